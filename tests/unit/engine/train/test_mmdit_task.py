"""What the transformer is trained on."""

import numpy as np
import pytest
import tiny_training
import torch

from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.scenes import render_scene, sample_scene
from opensora_cli.engine.configs import mmdit_config, vae_config
from opensora_cli.engine.train.loop import Chance
from opensora_cli.engine.train.mmdit import ClipSource, MMDiTTask, _attention
from opensora_cli.engine.train.vae import to_pixels
from opensora_cli.models.attention import math
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.enums import ConditionMode

SETTINGS = tiny_training.mmdit_settings("unused")


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return HunyuanVAE(vae_config(SETTINGS.vae)).eval().requires_grad_(False)


def source(vae, **weights):
    all_modes = {mode: weights.get(mode, 0.0) for mode in ConditionMode} if weights else {}
    settings = SETTINGS.train_mmdit.model_copy(
        update={"mode_weights": SETTINGS.train_mmdit.mode_weights.replace(all_modes)}
    )
    return ClipSource(vae, data=SETTINGS.data, settings=settings)


def encode(captions):
    """Encode a caption as its length."""
    lengths = torch.tensor([float(len(caption)) for caption in captions])
    return lengths.view(-1, 1, 1).expand(-1, 4, tiny_training.WIDTH), lengths.view(-1, 1).expand(
        -1, tiny_training.WIDTH
    )


def task(vae, *, text=encode, cond_embed=True, **changes):
    torch.manual_seed(0)
    weights = {} if cond_embed else {"t2v": 1.0}
    return MMDiTTask(
        mmdit_config(SETTINGS.model.model_copy(update={"cond_embed": cond_embed})),
        clips=source(vae, **weights),
        text=text,
        settings=SETTINGS.train_mmdit.model_copy(update=changes),
        batch_size=3,
        reporter=SilentReporter(),
    )


class TestClipSource:
    @pytest.mark.parametrize(
        ("mode", "given"),
        [
            ("t2v", [0, 0, 0, 0]),
            ("i2v_head", [1, 0, 0, 0]),
            ("i2v_tail", [0, 0, 0, 1]),
            ("i2v_loop", [1, 0, 0, 1]),
            ("v2v_head", [1, 1, 0, 0]),
            ("v2v_tail", [0, 0, 1, 1]),
            ("v2v_head_easy", [1, 1, 1, 0]),
            ("v2v_tail_easy", [0, 1, 1, 1]),
        ],
    )
    def test_every_mode_gives_its_frames(self, vae, mode, given):
        clip = source(vae, **{mode: 1.0}).fresh(np.random.default_rng(0))
        assert clip.latents_CTHW.shape == clip.reference_CTHW.shape == (4, 4, 8, 8)
        assert clip.mask_1THW.amin(dim=(0, 2, 3)).tolist() == clip.mask_1THW.amax(dim=(0, 2, 3)).tolist() == given
        assert clip.reference_CTHW.abs().amax(dim=(0, 2, 3)).gt(0).tolist() == [bool(frame) for frame in given]

    def test_modes_come_by_weight(self, vae):
        clips = source(vae, t2v=1.0, i2v_head=3.0)
        rng = np.random.default_rng(0)
        given = [bool(clips.fresh(rng).mask_1THW.any()) for _ in range(24)]
        assert sum(given) / len(given) == pytest.approx(0.75, abs=0.2)

    @pytest.mark.parametrize(
        ("mode", "frames", "position"),
        [
            ("i2v_head", slice(0, 1), slice(0, 1)),
            ("i2v_tail", slice(-1, None), slice(-1, None)),
            ("v2v_head", slice(0, 5), slice(0, 2)),
            ("v2v_tail", slice(-5, None), slice(-2, None)),
        ],
    )
    def test_references_are_encoded_on_their_own(self, vae, mode, frames, position):
        clip = source(vae, **{mode: 1.0}).fresh(np.random.default_rng(0))
        pixels = to_pixels(render_scene(sample_scene(np.random.default_rng(0)), size=32, num_frames=13)[None])
        alone = vae.encode(pixels[:, :, frames])[0]
        assert torch.allclose(clip.latents_CTHW.float(), vae.encode(pixels)[0], atol=1e-2)
        assert torch.allclose(clip.reference_CTHW[:, position].float(), alone, atol=1e-2)
        assert not torch.allclose(clip.latents_CTHW[:, position].float(), alone, atol=1e-2)


class TestTask:
    @pytest.mark.parametrize("autocast", [False, True])
    def test_the_same_chance_gives_the_same_loss(self, vae, autocast):
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss, figures = task(vae).loss(0, Chance.of_step(0, 0))
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        assert figures == {"clips": 7.0}
        # The model begins with velocity zero: what is left is the mean square of the target, noise - data.
        assert loss.item() > 1.0

    def test_the_ring_fills_up_and_then_turns(self, vae):
        running = task(vae)
        sizes = [running.loss(step, Chance.of_step(0, step))[1]["clips"] for step in range(4)]
        assert sizes == [7.0, 8.0, 8.0, 8.0]
        held = list(running._ring)
        running.loss(4, Chance.of_step(0, 4))
        assert [ours is theirs for ours, theirs in zip(held, running._ring, strict=True)] == [True] * 2 + [False] + [
            True
        ] * 5

    @pytest.mark.parametrize(("dropout", "empty"), [(0.0, 0), (1.0, 3)])
    def test_prompts_are_dropped(self, vae, dropout, empty):
        asked = []
        running = task(vae, text=lambda captions: asked.extend(captions) or encode(captions), text_dropout=dropout)
        running.loss(0, Chance.of_step(0, 0))
        assert (len(asked), asked.count("")) == (3, empty)

    def test_a_model_without_condition(self, vae):
        loss, _ = task(vae, cond_embed=False).loss(0, Chance.of_step(0, 0))
        assert loss.isfinite()


def test_attention_is_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(3))
    out = _attention(q, k, v)
    assert out.dtype == torch.float32
    assert torch.allclose(out, math(q, k, v), atol=0.03)
