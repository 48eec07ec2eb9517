"""The rules of generate settings: each broken alone, each message naming setting, value, rule and fix."""

import pytest
from pydantic import ValidationError

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.settings.devices import ParallelSettings
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import explain
from opensora_cli.settings.load import load_preset

RELEASED = load_preset("256px", prompt="raining, sea")
DEMO = load_preset("demo", prompt="raining, sea")
PICTURES = load_preset("flux1_dev", prompt="raining, sea")
HIGH_COMPRESSION = load_preset("high_compression", prompt="raining, sea").replace({"picture.first": False})

CAUSAL = {"video.causal_lengths": True}
EXTENDED = {"video.extend": 2}
HEAD = {"condition.mode": "i2v_head"}
PICTURE = {**HEAD, "condition.references": "a.png"}
LATER = {"condition.continued": 0}
TWO_BY_TWO = {"parallel.ulysses_degree": 2, "parallel.ring_degree": 2}
TENSOR = {"parallel.gpus": 2, "parallel.tensor_parallel_degree": 2}
WRONG_TIMES = ("2=snow", "2s=", "2s= ", "-1s=snow", "nans=snow", "infs=snow", "=snow", "snow", "2 3s=snow")
WITHOUT_OSCILLATION = {"sampling.text_oscillation": False, "sampling.image_oscillation": False}
BROKEN = {
    "released": [
        ({"prompt": ""}, "prompt is empty: describe the video"),
        (
            {"video.num_frames": 130},
            "must be a multiple of 4, plus 1, and at most 129 with the open-sora-v2 model: use",
        ),
        (CAUSAL, "has no effect with the causal hunyuan: drop it"),
        ({**EXTENDED, "video.num_frames": 33}, "since video.extend=2 gives 9 latent frames: use at least 37"),
        *(
            ({**EXTENDED, "prompts_at": (text,)}, f"prompts_at={text} must be a time in seconds")
            for text in WRONG_TIMES
        ),
        ({**EXTENDED, "prompts_at": ("9s=snow", "6s=sea")}, "prompts_at=6s=sea must come after 9s"),
        ({**EXTENDED, "prompts_at": ("0s=snow",)}, "prompts_at.at_s=0 must be over 0"),
        # Segments begin at the frames 0, 129 and 225.
        ({**EXTENDED, "prompts_at": ("9.4s=snow",)}, "no segment begins then: segments begin at 0s, 5.38s, 9.38s"),
        ({**EXTENDED, "prompts_at": ("1s=snow", "2s=sea")}, "prompts_at=1s=snow has no effect, since no segment"),
        ({"draft.strength": 0.5}, "draft.strength=0.5 has no effect without draft.resolution: give --draft-res, too"),
        ({"video.resolution": "256"}, "video.resolution=256 must be a pixel count, as in 256px or 720p"),
        ({"video.height": 256}, "video.height=256 must come with video.width"),
        ({"video.height": 256, "video.width": 8}, "video.width=8 must be a multiple of 16: use 16"),
        ({"sampling.seed": 2**62, "sampling.num_samples": 3}, f"use at most {2**62 - 2}"),
        ({"sampling.guidance_interval": "0.9,0.2"}, "sampling.guidance_interval=0.9,0.2 must be two times from 0"),
        ({"sampling.timesteps": "1,0.5,0.5,0"}, "sampling.timesteps=1,0.5,0.5,0 must fall from 1 (noise) to 0"),
        ({"sampling.timesteps": "1,0.5,0"}, "sampling.num_inference_steps=50: give --steps 2, too"),
        ({"sampling.timesteps": "1,0", "sampling.flow_shift": 3}, "give --steps 1, too"),
        ({"sampling.mean_guidance_of": 50, **WITHOUT_OSCILLATION}, "has no effect on guidance that does not oscillate"),
        ({"runtime.device": "gpu"}, "runtime.device=gpu must be auto, cpu, cuda or cuda:N"),
        ({"runtime.model_choice": "demo"}, "model.name=open-sora-v2 must be runtime.model_choice=demo"),
        ({**PICTURE, "condition.mode": "t2v"}, "condition.mode=t2v takes no reference, and 1 file is given: drop --c"),
        (HEAD, "condition.mode=i2v_head needs a reference: give the picture with --ref"),
        ({**HEAD, "condition.references": "a.png;b.png"}, "takes at most 1, and 2 files are given: drop some"),
        ({**PICTURE, "model.cond_embed": False}, "condition.mode=i2v_head needs a model that takes references"),
        ({**LATER, **PICTURE}, "condition.mode=i2v_head does not continue a video"),
        (LATER, "condition.continued needs 1 reference, and 0 files are given: use --continue"),
        ({"output.path": "a.mp4", "output.format": "gif"}, "output.format=gif must agree with the ending of output.pa"),
        ({"vae.kind": "flux_ae"}, "vae.kind=flux_ae makes pictures, and video.num_frames=129: use v"),
        ({"model.in_channels": 32}, "must be the autoencoder's latent channels (16) x model.patch_size=2 squared"),
        ({"picture.save": True}, "picture.save=true has no effect without picture.first: give --t2i2v, too"),
        ({"picture.first": True, "condition.mode": "t2v"}, "makes one: use i2v_head, i2v_tail or i2v_loop"),
        ({"picture.first": True, **HEAD, "video.num_frames": 1}, "since condition.mode=i2v_head gives 1 latent frames"),
    ],
    "demo": [
        ({"video.resolution": "768px"}, "use 128px, or get the released model: osora ckpt download open-sora-v2"),
        ({"video.aspect_ratio": "16:9"}, "video.aspect_ratio=16:9 does not suit the demo model: use 1:1"),
        ({"draft.resolution": "128px"}, "does not go with the demo model, which has one size: drop it"),
        ({"video.num_frames": 129}, "at most 33 with the demo model: use 33"),
        ({"parallel.gpus": 3, "parallel.devices": "0,2"}, "parallel.gpus=3 must be the number of parallel.devices, 2"),
        ({"parallel.devices": "1,1"}, "parallel.devices=1,1 names a GPU twice"),
        ({"parallel.devices": "0,x"}, "parallel.devices=x must be a whole number"),
        ({"parallel.gpus": 8, "parallel.ulysses_degree": 3}, "parallel.ulysses_degree=3 must divide the 8 devices"),
        ({**TWO_BY_TWO, "parallel.gpus": 6}, "parallel.ulysses_degree=2 x parallel.ring_degree=2 must divide the 6"),
        ({"parallel.gpus": 5, "parallel.tensor_parallel_degree": 5}, "must divide model.num_heads=4: use 1, 2 or 4"),
        ({**TENSOR, "compile": "true"}, "compile=true does not go with parallel.tensor_parallel_degree=2"),
        ({"parallel.gpus": 8, "parallel.ulysses_degree": 8}, "must be at most the 4 heads"),
        ({"parallel.gpus": 2, "runtime.device": "cuda:1"}, "is one GPU"),
    ],
    "high compression": [
        ({"video.num_frames": 129}, "video.num_frames=129 must be 1, or a multiple of 4 from 8 on, and at most 128"),
        ({"video.num_frames": 4}, "use 8"),
        ({"video.num_frames": 5, "video.max_frames": 4}, "at most 1 with the open-sora-v2-dc-ae model: use 1"),
        ({**CAUSAL, "video.num_frames": 129}, "must be 1, or at least 5 and at most 128"),
        ({**CAUSAL, "video.num_frames": 4}, "use 5"),
        ({**PICTURE, "video.num_frames": 1}, "gives 1 latent frames: use at least 8"),
        (
            {**CAUSAL, **PICTURE, "condition.mode": "v2v_tail"},
            "vae.kind=dc_ae cannot encode, 1 more than a multiple of 4",
        ),
        ({"video.height": 576, "video.width": 1008}, "video.width=1008 must be a multiple of 32: use 992 or 1024"),
    ],
    "pictures": [
        ({"video.num_frames": 5}, "video.num_frames=5 must be 1 with the flux1-dev model, which makes pictures"),
        ({"video.resolution": "512px"}, "does not suit the flux1-dev model: use 256px, 768px or 1024px"),
    ],
}
MODELS = {"released": RELEASED, "demo": DEMO, "high compression": HIGH_COMPRESSION, "pictures": PICTURES}


def problems(settings: GenerateSettings, changes: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        settings.replace(changes)
    return "\n".join(explain(caught.value))


@pytest.mark.parametrize(
    ("model", "changes", "message"), [(model, *row) for model, rows in BROKEN.items() for row in rows]
)
def test_broken_rules(model: str, changes: dict[str, object], message: str) -> None:
    assert message in problems(MODELS[model], changes)


def test_defaults_are_the_released_model_at_256px() -> None:
    assert GenerateSettings(prompt="raining, sea") == RELEASED


def test_every_broken_rule_is_told_at_once() -> None:
    found = problems(RELEASED, {"video.num_frames": 130, "video.resolution": "1px", "prompt": ""})
    keys = [line.partition("=")[0].partition(" ")[0] for line in found.splitlines()]
    assert keys == ["prompt", "video.resolution", "video.num_frames"]


@pytest.mark.parametrize(
    "changes",
    [
        {"video.height": 256, "video.width": 448, "video.resolution": "512px"},
        {"prompt": "", "from_latents": "a.safetensors"},
        {"condition.references": "a.png;b.png", "condition.mode": "i2v_loop"},
        {"condition.references": "a.png", "condition.mode": "i2v_loop"},
        {"output.path": "v1.2/clips"},
        {"sampling.seed": 2**62},
    ],
)
def test_allowed(changes: dict[str, object]) -> None:
    assert RELEASED.replace(changes) != RELEASED


@pytest.mark.parametrize("mode", list(CONDITION_MODES))
@pytest.mark.parametrize("model", ["released", "high compression", "demo"])
def test_all_modes_fit_the_full_length(mode: str, model: str) -> None:
    references = ("file",) if CONDITION_MODES[mode].needs_reference else ()
    assert MODELS[model].replace({"condition.mode": mode, "condition.references": references}).condition.mode == mode


@pytest.mark.parametrize("text", ["none", "None", "null", "~", ""])
def test_words_for_no_value(text: str) -> None:
    assert RELEASED.replace({"prompt_suffix.motion_score": text}).prompt_suffix.motion_score is None
    assert RELEASED.replace({"negative_prompt": text}).negative_prompt == text


@pytest.mark.parametrize("text", ["16,56,56", "[16, 56, 56]", " 16 ,56,56,"])
def test_lists_as_text(text: str) -> None:
    assert RELEASED.replace({"model.axes_dim": text}).model.axes_dim == (16, 56, 56)
    # File names may have commas.
    references = RELEASED.replace({"condition.references": "a,b.png; c d.png;"}).condition.references
    assert references == ("a,b.png", "c d.png")


@pytest.mark.parametrize(
    ("path", "format_", "expected"),
    [("samples", None, "mp4"), ("samples", "gif", "gif"), ("dir/A.PNG", None, "png"), ("v1.5", None, "mp4")],
)
def test_output_format(path: str, format_: str | None, expected: str) -> None:
    settings = RELEASED.replace({"output.path": path, "output.format": format_})
    assert settings.output_format is MediaFormat(expected)
    is_default = (settings.output.format, settings.output.named_format) == (None, None)
    picture = settings.replace({"video.num_frames": 1})
    assert picture.output_format is MediaFormat("png" if is_default else expected)


@pytest.mark.parametrize(
    ("model", "changes", "frames"),
    [
        ("released", {}, 33),
        ("released", {"video.num_frames": 1}, 1),
        ("high compression", PICTURE, 32),
        ("high compression", {**PICTURE, "video.num_frames": 8}, 2),
        *(("high compression", {**CAUSAL, **PICTURE, "video.num_frames": number}, 2) for number in (5, 8)),
    ],
)
def test_latent_frames(model: str, changes: dict[str, object], frames: int) -> None:
    settings = MODELS[model].replace(changes)
    assert (settings.num_latent_frames, settings.size_multiple) == (frames, 16 if model == "released" else 32)


@pytest.mark.parametrize(
    ("model", "changes", "frames"),
    [
        ("released", {"video.picture_frames": 9}, 33),
        ("released", {"video.num_frames": 1}, 1),
        ("released", {"video.num_frames": 1, "video.picture_frames": 9}, 3),
        ("released", {"video.num_frames": 1, "video.picture_frames": 12}, 3),
        ("released", {"video.num_frames": 1, "video.picture_frames": 500}, 33),
        ("high compression", {"video.num_frames": 1, "video.picture_frames": 9}, 2),
    ],
)
def test_sampled_latent_frames(model: str, changes: dict[str, object], frames: int) -> None:
    assert MODELS[model].replace(changes).sampled_latent_frames == frames


@pytest.mark.parametrize(
    ("prompts", "held"),
    [
        ("2s=snow", ("sea", "snow", "snow")),
        # To the nearest frame, and of each segment where its own frames begin: at 5.375 s and at 9.375 s.
        ("5.38s=snow; 9.37s=night", ("sea", "snow", "night")),
        (["5.4s=snow"], ("sea", "sea", "snow")),
        (({"at_s": "9", "prompt": "rain; wind"},), ("sea", "sea", "rain; wind")),
    ],
)
def test_a_segment_has_the_prompt_of_the_time_at_which_its_own_frames_begin(
    prompts: object, held: tuple[str, ...]
) -> None:
    settings = RELEASED.replace({"prompt": "sea", "video.extend": 2, "prompts_at": prompts})
    assert settings.segment_starts == (0, 129, 225)
    assert settings.segment_prompts == held
    assert GenerateSettings.model_validate_json(settings.model_dump_json()) == settings


def test_an_automatic_motion_score_asks_the_server() -> None:
    settings = RELEASED.replace({"prompt_suffix.motion_score": "auto"})
    assert (settings.refine.motion_score, settings.prompt_suffix.motion_score) == (True, 4)
    assert (settings.refine.is_on, settings.refine.prompt, RELEASED.refine.is_on) == (True, False, False)
    assert GenerateSettings.model_validate(settings.model_dump(mode="json")) == settings
    with pytest.raises(ValidationError):
        RELEASED.replace({"refine": "auto", "prompt_suffix.motion_score": "auto"})


@pytest.mark.parametrize(
    ("given", "ranks", "world"),
    [({}, 1, 1), ({"gpus": "8"}, 8, 8), ({"devices": "0,2"}, 2, 2), ({"gpus": 4, "nnodes": 2}, 4, 8)],
)
def test_ranks(given: dict[str, object], ranks: int, world: int) -> None:
    settings = ParallelSettings.model_validate(given)
    assert (settings.ranks_per_node, settings.world_size) == (ranks, world)
