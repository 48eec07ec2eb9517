"""A smaller video that is made first, from which the video starts in place of noise."""

import json

import pytest
import torch
from stopping import stopped
from tiny_world import RecordingReporter, demo_settings

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import denoise, pipeline
from opensora_cli.engine.generate.chain import make_chain
from opensora_cli.engine.generate.dry_run import PlanDocument
from opensora_cli.engine.generate.plan import DRAFT as DRAFT_ROLE
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.request import draft_settings, with_mode
from opensora_cli.engine.generate.run import generate
from opensora_cli.sampling.schedule import noise_latents
from opensora_cli.settings.load import load_preset

pytestmark = pytest.mark.usefixtures("without_estimates")

STEPS = 4
LARGE = {
    "video__height": "80",
    "video__width": "80",
    "video__num_frames": "5",
    "sampling__num_inference_steps": str(STEPS),
}
DRAFT = {**LARGE, "draft__resolution": "64px", "draft__strength": "0.5"}


def planned(settings):
    return make_plan(with_mode(settings, RecordingReporter()))


@pytest.mark.parametrize(
    ("changes", "draft"),
    [
        ({}, (192, 336)),
        ({"video.aspect_ratio": "1:1"}, (256, 256)),
        ({"video.height": 512, "video.width": 1024}, (176, 368)),
    ],
)
def test_the_draft_has_the_shape_of_the_video(changes, draft):
    settings = load_preset("768px", prompt="sea").replace(
        {"draft.resolution": "256px", "sampling.stop_at": 40, **changes}
    )
    made = draft_settings(settings)
    assert (made.video.height, made.video.width) == draft
    assert (made.draft.resolution, made.sampling.stop_at, made.sampling.seed) == (None, None, settings.sampling.seed)
    assert draft_settings(settings.replace({"draft": {}})) is None


def test_a_draft_that_is_not_smaller_is_refused(world, tmp_path):
    with pytest.raises(
        RequestError, match=r"draft.resolution=64px makes 64x64, which is not smaller than the video's 64"
    ):
        make_chain(with_mode(demo_settings(world, tmp_path, draft__resolution="64px"), RecordingReporter()))


def test_the_start_is_the_draft_mixed_with_the_noise_of_the_seed(world, tmp_path):
    plan = planned(demo_settings(world, tmp_path, **DRAFT))
    draft_CTHW = torch.randn(plan.latent_shape, generator=torch.Generator().manual_seed(1))
    embeds = PromptEmbeds(torch.zeros(2, 4, 8), torch.zeros(2, 8))

    def still(packed_BND, **inputs):
        return torch.zeros_like(packed_BND)

    made_CTHW = denoise.sample_latents(plan, still, embeds, None, seed=3, draft_CTHW=draft_CTHW, steps_done=plan.start)
    [noise_CTHW] = noise_latents(
        [3],
        num_latent_frames=2,
        height=80,
        width=80,
        device="cpu",
        dtype=torch.float32,
        spatial_compression=plan.settings.vae.grid.spatial_compression_ratio,
        patch_size=plan.settings.model.patch_size,
        latent_channels=plan.latent_shape[0],
    )
    t = plan.timesteps[plan.start]
    assert 0 < plan.start < STEPS
    torch.testing.assert_close(made_CTHW, (1 - t) * draft_CTHW + t * noise_CTHW)


def test_the_plan_has_both(world, tmp_path):
    chain = make_chain(with_mode(demo_settings(world, tmp_path, **DRAFT), RecordingReporter()))
    plan, draft = chain.video, chain.find(DRAFT_ROLE)
    assert (draft.height, draft.width, draft.settings.video.num_frames) == (64, 64, 5)
    # Two branches a step.
    assert plan.model_evaluations == 2 * (STEPS - plan.start)
    assert chain.model_evaluations == 2 * STEPS + 2 * (STEPS - plan.start)
    assert [stage.name for stage in chain.stages if stage.name.startswith("draft")]
    document = PlanDocument.of(chain)
    drafted, video = document.jobs
    assert (drafted.role, drafted.height, video.skipped_steps) == ("draft", 64, plan.start)
    assert any(line.startswith("draft     64x64, 5 frames") for line in document.lines())
    with pytest.raises(RequestError, match=r"sampling.stop_at=1 is over where the video starts from its draft"):
        planned(demo_settings(world, tmp_path, **DRAFT, sampling__stop_at="1"))


def test_a_video_starts_from_its_draft_which_has_its_seed_and_references(world, tmp_path, monkeypatch):
    given, denoised = [], denoise.sample_latents

    def watched(plan, transformer, embeds, references, **options):
        given.append((plan.width, plan.mode.name, options["seed"], options["steps_done"], references[0].shape[-1]))
        return denoised(plan, transformer, embeds, references, **options)

    monkeypatch.setattr(denoise, "sample_latents", watched)
    settings = demo_settings(
        world, tmp_path, **DRAFT, condition__references=str(world.picture), sampling__num_samples="2"
    )
    result = generate(settings)
    start = planned(settings).start
    patch = 64 // given[0][4]
    small, large = ((64, "i2v_head"), 64 // patch), ((80, "i2v_head"), 80 // patch)
    assert given == [
        (*shape, seed, steps, columns) for (shape, columns), steps in ((small, 0), (large, start)) for seed in (42, 43)
    ]
    document = json.loads(result.videos[0].sidecar.read_text())
    assert document["draft"]["skipped_steps"] == start
    assert document["model_evaluations"] == result.model_evaluations / 2
    assert document["settings"]["draft"] == {"resolution": "64px", "strength": 0.5}


@pytest.mark.slow
def test_what_is_stopped_goes_on_without_its_draft(world, tmp_path, monkeypatch):
    settings = demo_settings(world, tmp_path / "out", **{**DRAFT, "draft__strength": "0.9"})
    whole = generate(settings.replace({"output.path": str(tmp_path / "whole")})).videos[0].path.read_bytes()
    assert "--from" in stopped(settings, STEPS + 1)
    monkeypatch.setattr(pipeline, "_make_drafts", lambda chain, samples, *args: samples and pytest.fail("made again"))
    assert generate(settings).videos[0].path.read_bytes() == whole
