"""Settings of `osora train`: the recipes, where values come from, and the rules between them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError
from tiny_training import mmdit_settings

from opensora_cli.core.conditions import CONDITION_MODES, LatentGrid
from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.settings.devices import Strategy, TrainParallelSettings
from opensora_cli.settings.layers import Given, explain, list_presets
from opensora_cli.settings.train import TrainSettings, load_train_settings
from opensora_cli.settings.train_sections import DataSettings

RECIPES = list_presets("train")


def load(
    recipe: str | None, environment: dict[str, str] | None = None, *, saved: Path | None = None, **overrides: str
) -> TrainSettings:
    """Load a recipe, or the settings of a run; keys of `overrides` have `__` for the dot."""
    config = None if recipe is None else Path(recipe)
    given = {key.replace("__", "."): Given(value, "--set") for key, value in overrides.items()}
    return load_train_settings(config=config, overrides=given, environment=environment or {}, saved=saved)


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("target: vae\nloop:\n  steps: 1\n  seed: 1\n  micro_batches: 1\n")
    environment = {"OSORA_LOOP__SEED": "2", "OSORA_LOOP__MICRO_BATCHES": "2"}
    loop = load(str(path), environment, loop__micro_batches="3").loop
    assert (loop.steps, loop.seed, loop.micro_batches) == (1, 2, 3)


def test_variables_of_generate_are_left_alone() -> None:
    assert load("demo_lora", {"OSORA_SAMPLING__SEED": "1", "OSORA_RUNTIME__DEVICE": "cuda"}) == load("demo_lora")
    with pytest.raises(RequestError, match="OSORA_SAMPLING__SEAD in the environment is not a setting"):
        load("demo_lora", {"OSORA_SAMPLING__SEAD": "1"})


class TestFrom:
    """Settings of an earlier run."""

    def test_round_trip(self, tmp_path: Path) -> None:
        for recipe in RECIPES:
            settings = load(recipe, output=str(tmp_path))
            (tmp_path / "settings.json").write_text(json.dumps(settings.model_dump(mode="json")))
            given = {} if settings.clip_cache is None else {"train_mmdit__cache": settings.clip_cache}
            assert load(None, saved=tmp_path / "settings.json", **given) == settings
            assert load(recipe).output == f"runs/{recipe}"

    def test_above_the_environment_and_below_the_command_line(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.json"
        before = load("vae_hunyuan", loop__seed="1", loop__steps="900", output=str(tmp_path / "run"))
        path.write_text(json.dumps(before.model_dump(mode="json")))
        environment = {"OSORA_LOOP__SEED": "2", "OSORA_LOOP__STEPS": "2"}
        loop = load(None, environment, saved=path, loop__steps="901").loop
        assert (loop.seed, loop.steps) == (1, 901)

    def test_writes_into_its_folder_or_where_the_command_line_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "run" / "settings.json"
        path.parent.mkdir()
        (tmp_path / "run" / "link").symlink_to(tmp_path)
        for output in (str(tmp_path), "runs/elsewhere", str(tmp_path / "run" / "link" / "x")):
            path.write_text(json.dumps(load("vae_hunyuan", output=output).model_dump(mode="json")))
            with pytest.raises(RequestError, match=r"output=.* is outside the folder of that file") as caught:
                load(None, saved=path)
            assert caught.value.hint == f"to write there, or into another folder: --set output={output}"
            assert load(None, saved=path, output=output).output == output
        monkeypatch.chdir(tmp_path)
        inside = {"output": "run", "train_mmdit__cache": str(tmp_path / "cache")}
        path.write_text(json.dumps(load("demo_lora", **inside).model_dump(mode="json")))
        with pytest.raises(RequestError, match=r"train_mmdit\.cache=.* is outside the folder"):
            load(None, saved=path)
        # The launcher wrote it, from what the user asked for.
        launched = {"OSORA_RANK_LOG": str(path.with_name("rank0.log"))}
        assert load(None, launched, saved=path).train_mmdit.cache == str(tmp_path / "cache")

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "does not exist"), ("{", "is broken"), ("[1]", "is broken"), ("{}", "holds no settings")],
    )
    def test_broken(self, tmp_path: Path, content: str | None, message: str) -> None:
        path = tmp_path / "settings.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(FileProblem, match=message):
            load(None, saved=path)


def test_single_modes_can_be_weighed() -> None:
    settings = load("demo_lora", train_mmdit__mode_weights__t2v="0", train_mmdit__mode_weights__i2v_loop="7")
    by_mode = settings.train_mmdit.mode_weights.by_mode()
    assert "t2v" not in by_mode
    assert by_mode["i2v_loop"] == 7.0
    with pytest.raises(RequestError, match=r"train_mmdit\.mode_weights are all 0"):
        load("demo_lora", **{f"train_mmdit__mode_weights__{mode}": "0" for mode in CONDITION_MODES})


@pytest.mark.parametrize(
    ("recipe", "assignments", "message"),
    [
        ("vae_hunyuan", "parallel.devices=1; device=xpu", "parallel.devices=1 does not go with device=xpu"),
        ("vae_hunyuan", "data.buckets={64px: {16: [1, 1]}}", "16 frames do not suit vae.kind: use 13"),
        ("demo_lora", "data.table=none; data.fps_max=3", "fps_max=3 (from --set) has no effect without"),
        ("demo_lora", "train_vae.kl_weight=1", "kl_weight=1 (from --set) has no effect with target=mmdit"),
        ("vae_hunyuan", "memory.checkpointing=full", "checkpointing=full (from --set) has no effect"),
        ("demo_lora", "memory.checkpoint_double_blocks=1", "no effect with memory.checkpointing=none"),
        (
            "demo_lora",
            "memory.checkpointing=full; memory.checkpoint_single_blocks=9",
            "at most the model's: use 0 to 8",
        ),
        ("demo_lora", "memory.host_weights=mapped", "no effect with memory.offload=none: use blocks"),
        ("demo_lora", "optimizer.muon_learning_rate=1", "has no effect with optimizer.name=adamw"),
        ("vae_hunyuan", "precision.compute=fp8", "precision.compute=fp8 must be one of fp32, bf16"),
        (
            "vae_hunyuan",
            "optimizer.schedule=cosine; optimizer.decay_steps=5",
            "no effect with optimizer.schedule=cosine",
        ),
        ("vae_dc_ae", "train_vae.kl_weight=0.1", "train_vae.kl_weight=0.1 has no effect with vae.kind=dc_ae"),
        ("vae_hunyuan", "train_vae.perceptual_files=a.pth; train_vae.perceptual_weight=0", "no effect with"),
        ("vae_hunyuan", "train_vae.decoder_only=true; train_vae.kl_weight=0.1; init=demo", "decoder_only=true: use 0"),
        ("vae_hunyuan", "train_vae.crop_size=30", "train_vae.crop_size=30 must be a multiple of 8, the side"),
        ("demo_lora", "lora.rank=257", "lora.rank=257 must be at most model.hidden_size=256"),
        ("vae_hunyuan", "samples.every=100", "samples.every=100 (from --set) has no effect with target=vae"),
        ("vae_dc_ae", "train_vae.discriminator.width=8", "discriminator.width=8 (from --set) has no effect"),
    ],
    ids=str,
)
def test_broken_rules(recipe: str, assignments: str, message: str) -> None:
    pairs = [each.partition("=") for each in assignments.split("; ")]
    with pytest.raises(RequestError) as caught:
        load(recipe, **{key.replace(".", "__"): value for key, _, value in pairs})
    assert message in caught.value.message


def test_prompts_of_samples_are_a_text_or_a_list() -> None:
    def prompts(text: str) -> tuple[str, ...]:
        return load("demo_lora", samples__every="100", samples__prompts=text).samples.prompts

    assert prompts("raining, sea") == ("raining, sea",)
    assert prompts('["raining, sea", snow]') == ("raining, sea", "snow")
    with pytest.raises(RequestError, match=r"samples\.every=100 needs samples.prompts"):
        prompts(" ")
    with pytest.raises(RequestError, match=r"samples\.prompts=.* must be a list"):
        prompts('["rain')


def test_sizes_that_are_not_used_may_be_anything() -> None:
    odd = load("vae_hunyuan").replace({"model.in_channels": 8})
    assert odd.model.in_channels == 8
    with pytest.raises(ValidationError):
        odd.replace({"target": "mmdit"})


CAUSAL = {"vae": {"kind": "hunyuan"}}
DC_AE = {"vae": {"kind": "dc_ae"}, "model": {"in_channels": 512}}
DC_AE_GRID = LatentGrid(latent_channels=128, time_compression_ratio=4, spatial_compression_ratio=32, is_causal=False)
SMALL = {"model": {"hidden_size": 64, "num_heads": 4, "axes_dim": "4,6,6"}, "precision": {"compute": "fp32"}}
ULYSSES = {"gpus": 4, "ulysses_degree": 4}


def weights(*modes: str) -> dict[str, object]:
    return {"train_mmdit": {"mode_weights": {mode: float(mode in modes) for mode in CONDITION_MODES}}}


def clips(frames: int) -> dict[str, object]:
    return {"data": {"buckets": {"256px": {frames: (1.0, 1)}}}}


def problems(*sections: Mapping[str, object], **others: object) -> list[str]:
    """Return the broken rules of a training run of the transformer."""
    values: dict[str, object] = {"target": "mmdit", "init": "demo"}
    for each in (*sections, others):
        values |= each
    try:
        TrainSettings.model_validate(values)
    except ValidationError as error:
        return explain(error)
    return []


@pytest.mark.parametrize(
    "written",
    ["{256px: {1: [1.0, 8], 33: [0.5, 2]}}", {"256px": {"1": ["1.0", "8"], "33": (0.5, 2)}}],
)
def test_buckets_may_be_text_or_mappings(written: object) -> None:
    data = DataSettings.model_validate({"buckets": written})
    assert data.buckets == {"256px": {1: (1.0, 8), 33: (0.5, 2)}}
    assert (data.buckets["256px"][33].batch_size, data.lengths()) == (2, (1, 33))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"buckets": {"256px": {}}}, "buckets.256px={} must have at least 1 item"),
        ({"buckets": {"256px": {1: (0.0, 1)}}}, "data.buckets have probability 0"),
        ({"buckets": "foo"}, "buckets=foo must be resolutions, frames, probabilities and batch sizes"),
        ({"buckets": "{64: {1: [1, 1]}}"}, "buckets.64=64 must be a resolution, as in 256px or 720p"),
        ({"buckets": "{64px: 3}"}, "buckets.64px=3 must be a valid dictionary"),
        ({"buckets": "{64px: {a: [1, 1]}}"}, "buckets.64px.a=a must be a whole number"),
        ({"buckets": "{64px: {17: 1}}"}, "buckets.64px.17=1 must be [probability, batch size]"),
        ({"buckets": "{64px: {17: [1, 0.5]}}"}, "buckets.64px.17=0.5 must be a whole number"),
        ({"buckets": "{256px: ["}, "buckets='{256px: [' must be resolutions"),
        ({"fps_max": 0}, "fps_max=0 must be over 0"),
    ],
)
def test_wrong_data_is_refused(values: dict[str, object], message: str) -> None:
    lines = problems(data=values)
    assert any(message in line for line in lines), lines


def test_lengths_of_clips_suit_the_autoencoder() -> None:
    assert problems(clips(32), CAUSAL, weights("t2v")) == [
        "data.buckets: clips of 32 frames do not suit vae.kind: use 29 frames"
    ]
    assert problems(clips(32), DC_AE, weights("t2v")) == []
    assert DataSettings.model_validate(clips(32)["data"]).length_problems(DC_AE_GRID) == []


@pytest.mark.parametrize(
    ("strategy", "given", "axes"),
    [
        ("zero3", {}, (1, 1, 1, 1, 1)),
        ("ddp", {"gpus": 8, "dp_replicate_degree": 8}, (8, 1, 1, 1, 1)),
        ("zero2", {"gpus": "8"}, (1, 8, 1, 1, 1)),
        ("zero2", {"gpus": 8, "nnodes": 2, "dp_shard_degree": 8}, (2, 8, 1, 1, 1)),
        ("zero3", {"gpus": 8, "dp_replicate_degree": 2}, (2, 4, 1, 1, 1)),
        ("hybrid", {"gpus": 8, "tensor_parallel_degree": 4}, (1, 2, 1, 1, 4)),
        ("hybrid", {"gpus": 8, "ulysses_degree": 2, "ring_degree": 2, "dp_shard_degree": 1}, (2, 1, 2, 2, 1)),
    ],
)
def test_axes_of_the_mesh(strategy: str, given: dict[str, int], axes: tuple[int, ...]) -> None:
    parallel = TrainParallelSettings.model_validate(given)
    names = ("replicate", "shard", "ring", "ulysses", "tensor")
    assert parallel.axes(Strategy(strategy)) == dict(zip(names, axes, strict=True))
    assert parallel.data_ranks(Strategy(strategy)) == axes[0] * axes[1]
    assert problems(SMALL, weights("t2v"), strategy=strategy, parallel=given) == []


@pytest.mark.parametrize(
    ("strategy", "parallel", "problem"),
    [
        ("zero3", {"gpus": 8, "dp_replicate_degree": 2, "dp_shard_degree": 2}, "parallel.dp_replicate_degree=2 x"),
        ("zero3", {"gpus": 8, "dp_shard_degree": 3}, "parallel.dp_shard_degree=3 must divide the 8 devices"),
        ("hybrid", {"gpus": 4}, "strategy=hybrid needs one of ulysses_degree, .* over 1: set it, or use zero3"),
        ("ddp", {"gpus": 4, "dp_replicate_degree": 2}, "_degree=2 must be .* strategy=ddp: drop it, or use 4"),
        ("hybrid", {"gpus": 8, "tensor_parallel_degree": 8}, "_degree=8 must be at most model.num_heads=4"),
        ("hybrid", {"gpus": 8, "tensor_parallel_degree": 2, "ulysses_degree": 4}, "the 2 heads of a device: use"),
        ("hybrid", {**ULYSSES, "compression": "fp8"}, "compression=fp8 would round gradients by up to 1/16"),
        ("hybrid", {**ULYSSES, "all_to_all": "hierarchical"}, "ulysses_degree=4 into equal parts of 4 devices: use"),
    ],
)
def test_devices_that_contradict_each_other(strategy: str, parallel: dict[str, object], problem: str) -> None:
    [found] = problems(SMALL, weights("t2v"), strategy=strategy, parallel=parallel)
    assert re.search(problem, found), found


def test_micro_batches_are_a_multiple_of_the_data_parallel_ranks() -> None:
    small = {**SMALL, **weights("t2v"), "loop": {"micro_batches": 6}}
    assert problems(small, strategy="hybrid", parallel={"gpus": 4, "ulysses_degree": 2}) == []
    assert problems(small, strategy="zero3", parallel={"gpus": 4}) == [
        "loop.micro_batches=6 must be a multiple of the 4 data-parallel ranks: use 8"
    ]


@pytest.mark.parametrize(
    ("parallel", "inner"),
    [
        ({"all_to_all": "direct"}, 1),
        ({"all_to_all": "hierarchical", "fast_link_ranks": 2}, 2),
        ({"all_to_all": "hierarchical", "gpus": 2, "nnodes": 2}, 2),
        ({"compression": "bf16"}, 1),
    ],
)
def test_exchanges(parallel: dict[str, object], inner: int) -> None:
    given = {**ULYSSES, **parallel}
    assert problems(SMALL, weights("t2v"), strategy="hybrid", parallel=given) == []
    assert TrainParallelSettings.model_validate(given).inner_ranks(ulysses=4, tensor=1) == inner


def test_the_model_takes_the_latents_and_the_references_of_its_modes() -> None:
    assert problems(clips(129)) == []
    assert problems(clips(128), DC_AE, weights("t2v", "i2v_head", "v2v_head_easy")) == []
    assert problems(clips(128), weights("t2v"), vae={"kind": "dc_ae"}) == [
        "model.in_channels=64 must be the autoencoder's latent channels (128) x model.patch_size=2 squared: use 512"
    ]
    model = {"model": {"cond_embed": False}}
    assert problems(clips(129), model, weights("t2v", "i2v_head")) == [
        "train_mmdit.mode_weights must be 0 except for t2v with model.cond_embed=false"
    ]
    assert problems(clips(129), model, weights("t2v")) == []


@pytest.mark.parametrize(
    ("mode", "sections", "longest", "shortest"),
    [
        ("i2v_head", CAUSAL, 1, 5),
        ("i2v_loop", CAUSAL, 5, 9),
        ("v2v_head", CAUSAL, 33, 37),
        ("v2v_tail_easy", CAUSAL, 65, 69),
        ("v2v_head", DC_AE, 32, 36),
    ],
)
def test_some_clip_must_leave_something_to_learn(
    mode: str, sections: dict[str, object], longest: int, shortest: int
) -> None:
    [problem] = problems(sections, clips(longest), weights("t2v", mode))
    assert problem.startswith(f"clips of {longest} frames leave nothing")
    assert f"at least {shortest} frames," in problem
    assert problems(sections, clips(shortest), weights("t2v", mode)) == []


TABLE = {"data.table": "clips.csv", "data.buckets": {"256px": {13: [1.0, 2]}}}
SHOWN = {"samples.every": 2, "samples.prompts": ("rain",)}
SIZE = {"samples.num_frames": 13, "samples.height": 32, "samples.width": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**TABLE, "validation.every": 2, "validation.table": "clips.csv"}, "must be another table than data.table"),
        ({**TABLE, **SHOWN, "samples.num_frames": 13}, "give samples.num_frames, samples.height and samples.width"),
        ({**SHOWN, **SIZE, "samples.num_frames": 15}, "samples.num_frames=15 does not suit vae.kind: use 13"),
        ({**SHOWN, **SIZE, "samples.height": 36}, "height=36 must be a multiple of 8: use 40"),
    ],
)
def test_validation_and_samples(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        mmdit_settings(Path("run")).replace(changes)
