"""A video that is extended: each segment from the last frames of the one before, joined without a flash."""

import json
from dataclasses import replace

import pytest
import torch
from small_stages import small_stages
from stopping import continued, stopped
from tiny_clips import write_clip
from tiny_world import RecordingReporter, demo_settings

from opensora_cli.core.exceptions import CheckpointError, MediaError
from opensora_cli.core.limits import PrivateMemory
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate import text
from opensora_cli.engine.generate.chain import make_chain
from opensora_cli.engine.generate.decode import Clip
from opensora_cli.engine.generate.dry_run import PlanDocument
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.pipeline import follow
from opensora_cli.engine.generate.ranks import ALONE
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.request import resolve, with_mode
from opensora_cli.engine.generate.run import generate, hold_from_request
from opensora_cli.engine.generate.sample import read_saved, save_latents
from opensora_cli.media.read import probe, read_video
from opensora_cli.media.resize import to_uint8
from opensora_cli.media.write import write_media
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, SavedSettings, read_sidecar

pytestmark = pytest.mark.usefixtures("without_estimates")

STEPS = 2
EXTENDED = {"video__extend": "2", "sampling__num_inference_steps": str(STEPS)}
STATE = "raining-sea_seed42.latents.safetensors"
LUMA = torch.tensor([0.299, 0.587, 0.114])


def luma(frames_THWC):
    return (frames_THWC.float() @ LUMA).mean((1, 2))


def held(settings) -> Clip:
    """Return a video in memory."""
    saved = SavedSettings(source="the test", values=settings.model_dump(mode="json"), is_own=True)
    video, _ = hold_from_request(GenerateRequest(saved=saved), LoadedModels(), reporter=RecordingReporter())
    return video


def clips(seed, *lengths):
    """Return consecutive clips of a moving picture, uint8, whose brightness changes a little from frame to frame."""
    random = torch.Generator().manual_seed(seed)
    scene = torch.randint(60, 190, (24, 24, 3), generator=random).float()
    means = torch.randn(sum(lengths), generator=random)
    frames = [scene.roll(index, 0) + mean for index, mean in enumerate(means)]
    return [part.round().to(torch.uint8) for part in torch.stack(frames).split(lengths)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("offset", [-12, -3, 0, 5])
def test_the_brightness_goes_on_at_a_seam(seed, offset):
    kept, new = clips(seed, 9, 8)
    remade, shifted = ((part.int() + offset).to(torch.uint8) for part in (kept, new))
    followed = follow(kept, remade, shifted)
    shift = float((followed[0].double() - shifted[0].double()).mean())
    steps = luma(torch.cat([kept, followed])).diff().abs()
    assert float(steps[8]) <= float(steps[:8].max()) + 0.1
    assert followed.dtype == torch.uint8
    # Only what the kept frames never do is more than the offset.
    assert abs(shift + offset) <= max(0.0, float(abs(luma(new)[0] - luma(kept)[-1]) - steps[:8].max())) + 0.3


def test_black_and_white_frames_stay_in_range():
    black, white = torch.zeros(3, 4, 4, 3, dtype=torch.uint8), torch.full((3, 4, 4, 3), 255, dtype=torch.uint8)
    followed = follow(black, white, white)
    assert (followed[0].max().item(), followed[-1].max().item()) == (0, 170)


@pytest.fixture(scope="module")
def video(world, tmp_path_factory):
    """The extended video in memory."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
        return held(demo_settings(world, tmp_path_factory.mktemp("held"), **EXTENDED))


def test_each_segment_goes_on_from_the_frames_before(world, tmp_path, video):
    first = held(demo_settings(world, tmp_path, sampling__num_inference_steps=str(STEPS)))
    assert len(first.frames_THWC) == 17
    assert video.chain.settings.overlap == 9
    assert video.frames_THWC.shape == (17 + 8 + 8, *first.frames_THWC.shape[1:])
    assert torch.equal(video.frames_THWC[:17], first.frames_THWC)
    segments = video.figures().segments
    assert [tuple(segment[key] for key in ("seed", "start_frame", "num_frames")) for segment in segments] == [
        (42, 0, 17),
        (10_042, 17, 8),
        (20_042, 25, 8),
    ]
    assert video.figures().given_frames_psnr_db is None


@pytest.mark.slow
def test_the_sidecar_has_every_segment_and_makes_the_same_again(world, tmp_path):
    settings = demo_settings(world, tmp_path / "one", **EXTENDED, sampling__num_samples="2")
    reporter = RecordingReporter()
    result = generate(settings, reporter=reporter)
    assert [video.seed for video in result.videos] == [42, 43]
    assert result.model_evaluations == 2 * (3 * STEPS * 2)
    assert read_video(result.videos[0].path).frames_THWC.shape[0] == 33
    document = json.loads(result.videos[1].sidecar.read_text())
    assert (document["num_frames"], document["model_evaluations"], document["seed"]) == (33, 12, 43)
    assert [segment["seed"] for segment in document["segments"]] == [43, 10_043, 20_043]
    assert document["settings"]["video"]["extend"] == 2
    assert "segment 3 of 3, seed 43" in reporter.notes
    overrides = {"output.path": Given(str(tmp_path / "two"), "--out"), "runtime.weights": Given(str(world.demo), "x")}
    request = GenerateRequest(overrides=overrides, saved=read_sidecar(result.videos[1].sidecar))
    made = generate(resolve(request, reporter=SilentReporter()))
    assert made.videos[0].path.read_bytes() == result.videos[1].path.read_bytes()
    assert generate(settings).videos[0].made_before


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """The extended video of a run that nothing stops."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("opensora_cli.engine.generate.plan.estimate_generation", small_stages)
        settings = demo_settings(world, tmp_path_factory.mktemp("whole"), **EXTENDED)
        return generate(settings).videos[0].path.read_bytes()


@pytest.mark.parametrize(
    "steps",
    [pytest.param(steps, marks=[] if steps == STEPS + 1 else pytest.mark.slow) for steps in range(1, 3 * STEPS)],
)
def test_what_is_stopped_in_a_segment_goes_on_to_the_same_bytes(world, tmp_path, monkeypatch, whole, steps):
    said = stopped(demo_settings(world, tmp_path, **EXTENDED), steps)
    assert said == f"continue with: osora generate --from {tmp_path / STATE} --weights {world.demo}"
    result = generate(demo_settings(world, tmp_path, **EXTENDED)) if steps % 2 else continued(tmp_path / STATE)
    assert result.model_evaluations == 2 * (3 * STEPS - steps)
    assert result.videos[0].path.read_bytes() == whole
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".mp4"]


def test_latents_of_another_number_of_segments_are_refused(world, tmp_path):
    chain = make_chain(with_mode(demo_settings(world, tmp_path, **EXTENDED), RecordingReporter()))
    plan, path = chain.video, tmp_path / STATE
    sample = replace(sample_files(plan.settings, 0), saved=path, saved_steps=3)
    latents = torch.zeros(plan.latent_shape)
    save_latents(path, latents, plan.settings, steps=3)
    with pytest.raises(CheckpointError, match=r"was saved after step 3 of 6"):
        read_saved(chain, sample, ALONE)
    save_latents(path, latents, plan.settings, steps=3, finished=[latents])
    assert [each.steps for each in read_saved(chain, sample, ALONE)] == [None, 1]


def test_prompts_by_time_are_encoded_once_each(world, tmp_path, monkeypatch, video):
    encode, encoded = text.encode_texts, []
    monkeypatch.setattr(text, "encode_texts", lambda texts, *args: encoded.extend(texts) or encode(texts, *args))
    one = demo_settings(world, tmp_path, **EXTENDED)
    prompted = held(one.replace({"prompts_at": ("2s=snow, sea",)}))
    assert encoded == [*(text.full_prompt(one, prompt) for prompt in ("raining, sea", "snow, sea")), ""]
    prompts = [segment["prompt"] for segment in prompted.figures().segments]
    assert prompts == ["raining, sea", "raining, sea", "snow, sea"]
    assert [each.shown for each in prompted.chain.settings.prompts_at] == ["2s=snow, sea"]
    assert torch.equal(prompted.frames_THWC[:25], video.frames_THWC[:25])
    assert not torch.equal(prompted.frames_THWC[25:], video.frames_THWC[25:])


def test_the_plan_has_all_segments(world, tmp_path):
    settings = demo_settings(world, tmp_path, **EXTENDED, sampling__image_guidance_scale="2")
    chain = make_chain(with_mode(settings, RecordingReporter()))
    plan = chain.video
    assert [(part.mode.name, part.model_evaluations) for part in chain.segments] == [
        ("t2v", 4),
        ("v2v_head", 6),
        ("v2v_head", 6),
    ]
    assert (plan.num_frames, chain.num_steps, chain.model_evaluations) == (33, 6, 16)
    assert [chain.evaluations_after(steps) for steps in range(7)] == [16, 14, 12, 9, 6, 3, 0]
    assert [stage.name for stage in chain.stages][-3:] == ["extend encode", "extend denoise", "extend decode"]
    document = PlanDocument.of(chain)
    assert (document.jobs[0].num_frames, document.model_evaluations) == (33, 16)
    assert [job.condition_mode for job in document.jobs] == ["t2v", "v2v_head", "v2v_head"]
    assert "extend    3 segments of 17 frames, the last 9 of each given to the next: 33 frames" in document.lines()


def continuing(world, folder, clip, **changes):
    changes = {"condition__references": str(clip), "condition__continued": "0", **changes}
    return demo_settings(world, folder, sampling__num_inference_steps=str(STEPS), **changes)


def test_a_video_is_continued_at_its_size_and_rate(world, tmp_path, reporter):
    clip = write_clip(tmp_path / "clip.mp4", num_frames=20, height=48, width=64, fps=10)
    settings = with_mode(continuing(world, tmp_path, clip), reporter)
    assert (settings.condition.mode, settings.condition.continued, settings.video.fps) == ("v2v_head", 20, 10)
    assert (settings.video.height, settings.video.width, settings.given_frames) == (48, 64, 9)
    assert (settings.num_frames, reporter.notes) == (20 + 17 - 9, [])
    made = held(settings)
    assert torch.equal(made.frames_THWC[:20], read_video(clip).frames_THWC)
    assert len(made.frames_THWC) == 28
    assert [(each["start_frame"], each["num_frames"]) for each in made.figures().segments] == [(20, 8)]
    [reference] = references_of(make_chain(settings).video, reporter)
    assert torch.equal(to_uint8(reference.pixels_CTHW), made.frames_THWC[11:20])
    longer = held(settings.replace({"video.extend": 1}))
    assert torch.equal(longer.frames_THWC[:28], made.frames_THWC)
    assert len(longer.frames_THWC) == 36


def test_what_a_continued_video_cannot_keep_is_said(world, tmp_path, reporter):
    clip = write_clip(tmp_path / "clip.mp4", num_frames=10, height=180, width=330, fps=11.99)
    settings = with_mode(continuing(world, tmp_path, clip), reporter)
    assert (settings.video.width, settings.video.height, settings.video.fps) == (160, 80, 12)
    assert reporter.notes == [
        "continue: 330x180 becomes 160x80, a size of the demo model (condition.fit=crop)",
        "continue: 11.99 frames a second become 12",
    ]
    assert held(settings).frames_THWC.shape == (18, 80, 160, 3)


@pytest.mark.parametrize(
    ("name", "frames", "says"),
    [
        ("missing.mp4", 0, "missing.mp4"),
        ("picture.png", 1, "is a picture, and --continue needs a video"),
        ("one.mp4", 1, "one.mp4 has 1 frame, and v2v_head needs 9"),
        ("short.mp4", 8, "short.mp4 has 8 frames, and v2v_head needs 9"),
        ("varies.mp4", 20, "varies.mp4 has frames of uneven length"),
        ("large.mp4", 20, "large.mp4 is too large: its 20 frames take "),
    ],
)
def test_what_cannot_be_continued_is_refused(world, tmp_path, monkeypatch, reporter, name, frames, says):
    path = tmp_path / name
    if frames:
        write_clip(tmp_path / ("two.mp4" if name == "one.mp4" else name), num_frames=2 if name == "one.mp4" else frames)
    if name == "one.mp4":
        write_media([read_video(tmp_path / "two.mp4").frames_THWC[:1]], path, fps=24, format="mp4")
    facts = probe(path) if frames else None
    if name == "varies.mp4":
        monkeypatch.setattr("opensora_cli.media.read.probe", lambda path: replace(facts, is_uneven=True))
    if name == "large.mp4":
        monkeypatch.setattr(
            "opensora_cli.engine.generate.request.read_private_memory", lambda: PrivateMemory(100_000, 10**9)
        )
    with pytest.raises(MediaError) as raised:
        with_mode(continuing(world, tmp_path, path), reporter)
    assert says in raised.value.message
