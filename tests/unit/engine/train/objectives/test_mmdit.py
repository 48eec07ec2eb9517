"""Inputs and targets of the transformer: modes, times, dropouts, guidance, and fresh or cached clips."""

import math
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tiny_training
import torch
from closeness import assert_close
from safetensors.torch import load_file
from tiny_autoencoders import VAES, moving_clip
from torch import nn

from opensora_cli.core.conditions import (
    CONDITION_MODES,
    ReferenceLengths,
    condition_mode,
    reference_parts,
)
from opensora_cli.data.batches import ClipBatch, ClipRequest, SampleRng
from opensora_cli.engine.components.architectures import mmdit_config, new_autoencoder
from opensora_cli.engine.encode.clips import CachedClip, Encoders, FreshClip, encode_for_cache, part_name
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask
from opensora_cli.models.mmdit.model import MMDiT

LENGTHS = ReferenceLengths(video=1, easy=2)
SETTINGS = tiny_training.mmdit_settings(Path("unused"))
WIDTH = tiny_training.WIDTH
CONFIG = mmdit_config(SETTINGS.model)


def rng(number: int) -> SampleRng:
    """The random state of a micro-batch."""
    return SampleRng.of(0, number)


def autoencoder(chosen):
    torch.manual_seed(0)
    return new_autoencoder(chosen).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def vae():
    return autoencoder(SETTINGS.vae)


def t5(captions):
    """Encode a caption as its length."""
    return torch.tensor([float(len(caption)) for caption in captions]).view(-1, 1, 1).expand(-1, 4, WIDTH)


def clip(captions):
    return -t5(captions)[:, 0]


class Spy(nn.Module):
    """Keeps what the transformer is given, and answers with zeros."""

    def __init__(self, config=CONFIG):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(()))
        self.calls = []

    def forward(self, packed_latents_BND, **inputs):
        self.calls.append({"latents": packed_latents_BND, **inputs})
        return packed_latents_BND * self.weight


def encoders(vae, **changes):
    return Encoders(vae, **{"t5": t5, "clip": clip, **changes})


def settings(weights=None, **changes):
    if weights is not None:
        changes["mode_weights"] = {mode: weights.get(mode, 0.0) for mode in CONDITION_MODES}
    return SETTINGS.replace({f"train_mmdit.{name}": value for name, value in changes.items()})


def task(frozen, *, module=None, vae=SETTINGS.vae, tables=(None, None), token_weights=None, **changes):
    # Sizes that only a model of these latents could have are not checked.
    train, validation = (table and str(table) for table in tables)
    run = settings(**changes)
    run = run.model_copy(
        update={
            "vae": vae,
            "data": run.data.model_copy(update={"table": train}),
            "validation": run.validation.model_copy(update={"table": validation}),
        }
    )
    return MMDiTTask(
        module or Spy(), run, empty_prompt=frozen.empty_prompt, encoders=lambda: frozen, token_weights=token_weights
    )


@cache
def pixels(count=3, *, num_frames=13):
    return torch.stack([moving_clip(number, num_frames=num_frames, size=32) for number in range(count)])


def batch(pixels_BTHWC, paths=None, **changes):
    count, num_frames, height, width, _ = pixels_BTHWC.shape
    each = {"fps": (12.0,) * count, "caption": tuple("x" * (i + 1) for i in range(count)), **changes}
    requests = [
        ClipRequest(
            path=paths[i] if paths else f"clip {i}",
            num_frames=num_frames,
            height=height,
            width=width,
            **{name: values[i] for name, values in each.items()},
        )
        for i in range(count)
    ]
    return ClipBatch(number=0, epoch=0, requests=tuple(requests), pixels_BTHWC=pixels_BTHWC, cached=None)


def permuted(original, order):
    requests = tuple(original.requests[i] for i in order)
    return replace(original, pixels_BTHWC=original.pixels_BTHWC[list(order)], requests=requests)


def cached(original, frozen, chosen):
    """The same batch, out of a cache of everything."""
    parts = {
        part_name(part): part
        for name in chosen.train_mmdit.mode_weights.by_mode()
        for part in reference_parts(condition_mode(name), lengths=LENGTHS)
    }
    clips = [
        CachedClip(encode_for_cache(FreshClip(frozen, frames, request, chosen.train_mmdit), parts))
        for frames, request in zip(original.pixels_BTHWC, original.requests, strict=True)
    ]
    return replace(original, pixels_BTHWC=None, cached=tuple(clips))


def given_frames(call, *, frames, tokens=16, patch=2):
    """Return (frames given, reference latents by frame) of the first sample, out of the packed conditioning."""
    conditioning = call["conditioning_BNK"][0].reshape(frames, tokens, -1)
    mask, reference = conditioning[..., : patch**2], conditioning[..., patch**2 :]
    assert mask.amin(dim=(1, 2)).equal(mask.amax(dim=(1, 2)))
    return mask.amax(dim=(1, 2)).tolist(), reference


class TestModes:
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
        spy = Spy()
        task(encoders(vae), module=spy, weights={mode: 1.0}).loss(batch(pixels(1)), rng(0))
        flags, reference = given_frames(spy.calls[0], frames=4)
        assert flags == given
        assert reference.abs().amax(dim=(1, 2)).gt(0).tolist() == [bool(frame) for frame in given]

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
        spy, clips = Spy(), pixels(1)
        task(encoders(vae), module=spy, weights={mode: 1.0}).loss(batch(clips), rng(0))
        _, reference = given_frames(spy.calls[0], frames=4)
        whole = (clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0).contiguous()
        alone, inside = vae.encode(whole[:, :, frames]), vae.encode(whole)[:, :, position]
        # By frame, then tokens (h w) of (c ph pw), as they are packed.
        packed = alone[0].reshape(4, -1, 4, 2, 4, 2).permute(1, 2, 4, 0, 3, 5).reshape(-1, 16, 16)
        assert_close(reference[position], packed, tolerance=1e-4)
        assert not torch.allclose(alone, inside, atol=1e-2)


class TestStep:
    def test_the_same_chance_gives_the_same_loss_whatever_the_precision(self, vae):
        torch.manual_seed(0)
        running = task(encoders(vae), module=MMDiT(CONFIG))
        losses = {}
        for autocast in (False, True):
            for attempt in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss, figures = running.loss(batch(pixels()), rng(0))
                loss.backward()
                losses[autocast, attempt] = loss
                assert figures == {}
        assert torch.equal(losses[False, 0], losses[False, 1])
        assert torch.equal(losses[True, 0], losses[True, 1])
        assert running.loss(batch(pixels()), rng(1))[0] != losses[False, 0]
        # The model begins with velocity zero: what is left is the mean square of the target, noise - data.
        assert losses[False, 0].item() > 1.0

    def test_a_sample_does_not_depend_on_its_place_in_the_batch(self, vae):
        spy = Spy()
        running = task(encoders(vae), module=spy)
        original = batch(pixels())
        straight, _ = running.loss(original, rng(0))
        turned, _ = running.loss(permuted(original, (2, 0, 1)), rng(0))
        for name, value in spy.calls[0].items():
            if value is not None:
                assert torch.equal(value[[2, 0, 1]], spy.calls[1][name]), name
        assert_close(straight, turned)

    def test_the_same_clip_twice_is_drawn_for_twice(self, vae):
        spy = Spy()
        clips = pixels(1).expand(2, -1, -1, -1, -1)
        running = task(encoders(vae), module=spy, weights={"t2v": 1.0})
        running.loss(batch(clips, paths=("same", "same")), rng(0))
        assert spy.calls[0]["timesteps_B"][0] != spy.calls[0]["timesteps_B"][1]

    def test_clips_that_were_moved_with_their_table_get_the_same(self, vae, tmp_path):
        losses = []
        for folder in (tmp_path / "here", tmp_path / "there" / "deep"):
            running = task(encoders(vae), tables=(tmp_path / "other" / "a.csv", folder / "b.csv"))
            losses.append(running.loss(batch(pixels(2), paths=(str(folder / "a.mp4"), str(folder / "b.mp4"))), rng(0)))
        assert losses[0] == losses[1]
        elsewhere = task(encoders(vae)).loss(batch(pixels(2), paths=("/c.mp4", "/d.mp4")), rng(0))
        assert elsewhere != losses[0]

    def test_time_and_noise_are_those_of_the_formula(self, vae):
        """The input of the model is x_t of the data and noise of the target."""
        spy = Spy()
        loss, _ = task(encoders(vae), module=spy, weights={"t2v": 1.0}).loss(batch(pixels(2)), rng(0))
        call = spy.calls[0]
        clips = (pixels(2).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0).contiguous()
        data = torch.cat([vae.encode(each[None]) for each in clips])
        packed = data.reshape(2, 4, 4, 4, 2, 4, 2).permute(0, 2, 3, 5, 1, 4, 6).reshape(2, 64, 16)
        t = call["timesteps_B"].view(-1, 1, 1)
        noise = (call["latents"] - (1 - t) * packed) / (1 - (1 - 1e-5) * (1 - t))
        assert noise.std().item() == pytest.approx(1.0, abs=0.05)
        assert loss.item() == pytest.approx(((1 - 1e-5) * noise - packed).square().mean().item(), rel=1e-4)

    def test_threads_draw_the_same_noise(self, vae):
        chosen = task(encoders(vae))
        inputs = []
        for chosen._drawing in (None, ThreadPoolExecutor(2)):
            chosen.loss(batch(pixels()), rng(0))
            inputs.append(chosen.module.calls[-1])
        assert torch.equal(inputs[0]["latents"], inputs[1]["latents"])
        assert torch.equal(inputs[0]["timesteps_B"], inputs[1]["timesteps_B"])

    def test_masked_loss_leaves_given_frames_out(self, vae):
        losses = {
            masked: task(encoders(vae), weights={"i2v_head": 1.0}, masked_loss=masked).loss(batch(pixels()), rng(0))[0]
            for masked in (False, True)
        }
        assert losses[True] != losses[False]

    def test_weights_of_tokens(self, vae):
        def loss(*weights, clips=2):
            def weigh(_, grid):
                return torch.tensor(weights)[:, None].expand(-1, math.prod(grid))

            running = task(encoders(vae), weights={"t2v": 1.0}, token_weights=weigh if weights else None)
            return running.loss(batch(pixels(2)[:clips]), rng(0))[0].item()

        assert loss(3.0, 3.0) == pytest.approx(loss())
        # A clip is drawn for by its path alone.
        assert loss(1.0, 0.0) == pytest.approx(loss(clips=1))
        assert loss(1.0, 3.0) == pytest.approx((loss(1.0, 0.0) + 3 * loss(0.0, 1.0)) / 4)
        assert loss(1.0, 0.0) != pytest.approx(loss(0.0, 1.0), rel=1e-3)

    def test_tokens_and_samples(self, vae):
        running = task(encoders(vae))
        original = batch(pixels(2))
        assert running.tokens(original) == running.tokens(cached(original, encoders(vae), settings())) == 2 * 4 * 16


class TestText:
    def test_captions_are_dropped_independently(self, vae):
        spy = Spy()
        running = task(encoders(vae), module=spy, weights={"t2v": 1.0}, t5_dropout=0.5, clip_dropout=0.25)
        pictures = batch(pixels(25, num_frames=1))
        for number in range(4):
            running.loss(pictures, rng(number))
        no_t5 = torch.cat([call["prompt_embeds_BLC"][:, 0, 0] == 0 for call in spy.calls])
        no_clip = torch.cat([call["pooled_prompt_embeds_BV"][:, 0] == 0 for call in spy.calls])
        assert len(no_t5) == 100
        # Seeded; expected 50, 25 and 12.5 of 100.
        assert no_t5.sum().item() == pytest.approx(50, abs=15)
        assert no_clip.sum().item() == pytest.approx(25, abs=13)
        assert (no_t5 & no_clip).sum().item() == pytest.approx(12.5, abs=9)

    def test_captions_say_rate_and_motion(self, vae):
        asked = []
        frozen = encoders(vae, t5=lambda captions: asked.extend(captions) or t5(captions))
        running = task(frozen, t5_dropout=0.0)
        running.loss(batch(pixels(2), motion_score=(3.5, None), fps=(24.0, 0.0)), rng(0))
        assert asked == ["", "x 24 FPS, 4 motion score.", "xx"]


class TestModels:
    def test_a_distilled_model_is_told_its_guidance(self, vae):
        config = CONFIG.replace({"guidance_embed": True})
        spy = Spy(config)
        task(encoders(vae), module=spy, embedded_guidance=3.5).loss(batch(pixels(2)), rng(0))
        assert spy.calls[0]["embedded_guidance_B"].tolist() == [3.5, 3.5]
        module = MMDiT(config)
        nn.init.normal_(module.final_layer.linear.weight)
        loss, _ = task(encoders(vae), module=module).loss(batch(pixels(2)), rng(0))
        loss.backward()
        assert module.guidance_in.in_layer.weight.grad.isfinite().all()

    @pytest.mark.parametrize(
        ("mode", "given", "encoded"),
        [
            ("t2v", [0, 0, 0, 0], [8]),
            ("i2v_head", [1, 0, 0, 0], [8, 1]),
            ("i2v_loop", [1, 0, 0, 1], [8, 1, 1]),
            ("v2v_head", [1, 0, 0, 0], [8]),
            ("v2v_tail_easy", [0, 0, 1, 1], [8]),
        ],
    )
    def test_the_video_dc_ae(self, mode, given, encoded, monkeypatch):
        """Pictures are encoded on their own; videos, without one more latent frame, are cut out of the clip's."""
        vae = autoencoder(VAES["dc_ae"])
        clips, seen, encode = pixels(1, num_frames=8), [], vae.encode
        monkeypatch.setattr(vae, "encode", lambda x, **kind: seen.append(x.shape[2]) or encode(x, **kind))
        spy = Spy(CONFIG.replace({"in_channels": 8, "patch_size": 1}))
        frozen = encoders(vae)
        running = task(frozen, module=spy, vae=VAES["dc_ae"], weights={mode: 1.0})
        loss, _ = running.loss(batch(clips), rng(0))
        assert loss.isfinite()
        assert running.tokens(batch(clips)) == spy.calls[0]["latents"].shape[1] == 4 * 256
        flags, reference = given_frames(spy.calls[0], frames=4, tokens=256, patch=1)
        assert flags == given
        assert seen == encoded
        for index, frame in enumerate(given):
            inside, alone = (
                frozen.latents(clips[0])[:, index],
                frozen.latents(clips[0, [0 if index == 0 else -1]])[:, 0],
            )
            wanted = alone if mode.startswith("i2v") else inside
            assert torch.equal(reference[index], frame * wanted.flatten(1).T)


class TestCached:
    def test_the_loss_is_that_of_fresh_clips_bit_for_bit(self, vae):
        frozen, original = encoders(vae), batch(pixels(4))
        torch.manual_seed(0)
        module = MMDiT(CONFIG)
        nn.init.normal_(module.final_layer.linear.weight)
        nn.init.normal_(module.cond_in.weight)
        running = task(frozen, module=module)
        stored = cached(original, frozen, settings())
        for number in range(4):
            fresh, _ = running.loss(original, rng(number))
            again, _ = running.loss(stored, rng(number))
            assert torch.equal(fresh, again)

    def test_so_it_is_in_bfloat16(self, vae):
        rounding = deepcopy(vae).bfloat16()
        frozen = encoders(
            rounding,
            dtype=torch.bfloat16,
            t5=lambda texts: t5(texts).bfloat16(),
            clip=lambda texts: clip(texts).bfloat16(),
        )
        original, running = batch(pixels(2)), task(frozen)
        stored = cached(original, frozen, settings())
        assert {tensor.dtype for one in stored.cached for tensor in one.values()} == {torch.bfloat16}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [running.loss(each, rng(0))[0] for each in (original, stored)]
        assert torch.equal(*losses)


def test_weights_are_exported_in_half_precision(vae, tmp_path):
    module = MMDiT(CONFIG)
    task(encoders(vae), module=module).export(module.state_dict(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["transformer.safetensors"]
    exported = load_file(tmp_path / "transformer.safetensors")
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], weight.half()) for name, weight in module.state_dict().items())
