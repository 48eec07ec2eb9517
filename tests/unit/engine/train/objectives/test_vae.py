"""The autoencoder's loss: its value and its gradient, against torch's own way through the same network."""

import numpy as np
import pytest
import torch
from closeness import assert_close
from tiny_autoencoders import NUM_FRAMES, VAES, clip_batch, vae_task
from toy_training import Listener

from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.train.objectives.vae import PerceptualDistance, VAETask, cut_squares, to_pixels
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import OptimizerSettings

CPU = torch.device("cpu")
DISCRIMINATOR = {"weight": 0.05, "width": 8, "layers": 2}


@pytest.fixture(scope="module")
def perceptual():
    torch.manual_seed(0)
    distance = PerceptualDistance().requires_grad_(False)
    for name, weight in distance.named_parameters():
        if weight.ndim == 4:
            torch.nn.init.kaiming_normal_(weight)  # else the signal dies out on its way
        elif name.startswith("lins"):
            weight.fill_(1e-3)
    return distance


def gradients(module):
    return {name: weight.grad.clone() for name, weight in module.named_parameters()}


def direct_gradients(task, batch, *, step, perceptual):
    """Differentiate the objective as it is written down, twice through the decoder's last layer for the balance."""
    rng, settings, last = SampleRng.of(0, batch.number), task._settings, task.module.last_layer.weight
    pixels = to_pixels(batch.pixels_BTHWC)
    made, mean, logvar = task.module(pixels, generator=rng.torch)
    loss = (made - pixels).abs().mean() + settings.squared_error_weight * (made - pixels).square().mean()
    for axis in (-1, -2):
        loss = loss + settings.gradient_weight * (made - pixels).diff(dim=axis).abs().mean()
    if perceptual is not None:
        loss = loss + settings.perceptual_weight * perceptual(made, pixels)
    if step >= settings.discriminator.start_step:
        against = -task.adversary.module(made).mean()
        norms = [torch.autograd.grad(term, last, retain_graph=True)[0].norm() for term in (loss, against)]
        loss = loss + settings.discriminator.weight * (norms[0] / (norms[1] + 1e-4)).clamp(max=1e4) * against
    if logvar is not None:
        loss = loss + settings.kl_weight * 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
    names, weights = zip(*task.module.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


@pytest.mark.parametrize(
    ("kind", "num_frames", "step"),
    [
        ("hunyuan", "clip", 3),
        ("hunyuan", "picture", 2),
        pytest.param("dc_ae", "picture", 3, marks=pytest.mark.slow),
        ("flux_ae", "clip", 2),
    ],
)
def test_value_and_gradient_are_those_of_autograd(kind, num_frames, step, perceptual):
    objective = {
        "squared_error_weight": 2.0,
        "gradient_weight": 0.5,
        "kl_weight": 0.0 if kind == "dc_ae" else 1e-2,
        "perceptual_weight": 0.5,
        "discriminator": {**DISCRIMINATOR, "start_step": 3},
    }
    task = vae_task(kind, perceptual=perceptual, **objective)
    batch = clip_batch(0, num_frames=NUM_FRAMES[kind] if num_frames == "clip" else 1)
    task.begin_step(step)
    loss, figures = task.loss(batch, SampleRng.of(0, 0))
    (loss * 3.0).backward()
    expected, direct = direct_gradients(task, batch, step=step, perceptual=perceptual)
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    with torch.no_grad():
        made = task.module(pixels := to_pixels(batch.pixels_BTHWC), generator=SampleRng.of(0, 0).torch)[0]
    assert float(figures["psnr"]) == pytest.approx(float(-10 * ((made - pixels).square().mean() / 4).log10()), rel=1e-4)
    found = gradients(task.module)
    assert found.keys() == direct.keys()
    largest = max(float(gradient.abs().max()) for gradient in direct.values())
    for name, gradient in direct.items():
        assert torch.allclose(found[name], 3.0 * gradient, rtol=1e-3, atol=1e-5 * largest), name
    assert figures.keys() == {
        "psnr",
        "lpips",
        *(("kl",) if kind != "dc_ae" else ()),
        *(("adversarial", "adversarial_weight") if step == 3 else ()),
    }
    assert all(weight.grad is None for weight in task.adversary.module.parameters())


class TestDiscriminator:
    def test_its_loss_is_of_real_and_decoded_clips_and_reaches_it_alone(self):
        task = vae_task("hunyuan", discriminator=DISCRIMINATOR)
        batch = clip_batch(0, num_frames=5)
        task.begin_step(0)
        _, (_, loss, figures) = task.losses(batch, SampleRng.of(0, 0))
        loss.backward()
        assert all(weight.grad is None for weight in task.module.parameters())
        assert all(weight.grad is not None for weight in task.adversary.module.parameters())
        pixels = to_pixels(batch.pixels_BTHWC)
        with torch.no_grad():
            made = task.module(pixels, generator=SampleRng.of(0, 0).torch).pixels_BCTHW
            real, fake = task.adversary.module(pixels), task.adversary.module(made)
        expected = 0.5 * ((1 - real).clamp(min=0).mean() + (1 + fake).clamp(min=0).mean())
        assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
        assert figures == pytest.approx({"real_logit": float(real.mean()), "made_logit": float(fake.mean())}, rel=1e-4)

    def test_it_has_a_rate_of_its_own_on_the_same_schedule(self):
        optimizer = OptimizerSettings(name="muon", learning_rate=6e-4, warmup_steps=5, decay_steps=7, beta2=0.95)
        task = vae_task("hunyuan", optimizer=optimizer, discriminator={**DISCRIMINATOR, "learning_rate": 3e-5})
        found = task.adversary.optimizer
        assert (found.name, found.learning_rate) == ("adamw", 3e-5)
        assert (found.warmup_steps, found.decay_steps, found.beta2) == (5, 7, 0.95)

    def test_losses_of_a_validation_leave_it_out(self):
        task = vae_task("hunyuan", discriminator=DISCRIMINATOR)
        batch, losses = clip_batch(0, num_frames=5), []
        for step in (0, 1):
            task._settings = task._settings.replace({"discriminator.start_step": 1})
            task.begin_step(step)
            with torch.no_grad():
                loss, figures = task.loss(batch, SampleRng.of(0, 0))
            losses.append(float(loss))
            assert figures.keys() == {"psnr", "kl"}
        assert losses[0] == losses[1]


class TestPictures:
    def test_a_share_of_the_batches_becomes_single_frames(self):
        task = vae_task("dc_ae", single_frame_share=0.25)
        batch = clip_batch(0, num_frames=4)
        shapes = [tuple(task._pixels(batch, SampleRng.of(0, number)).shape) for number in range(400)]
        assert set(shapes) == {(2, 3, 4, 16, 16), (2, 3, 1, 16, 16)}
        assert 70 <= shapes.count((2, 3, 1, 16, 16)) <= 130

    def test_they_are_frames_of_their_clips(self):
        task = vae_task("dc_ae", single_frame_share=1.0)
        batch = clip_batch(0, num_frames=4)
        clips, chosen = to_pixels(batch.pixels_BTHWC), set()
        for number in range(30):
            pictures = task._pixels(batch, SampleRng.of(0, number))
            for clip, picture in zip(clips, pictures, strict=True):
                places = [index for index in range(4) if torch.equal(clip[:, index], picture[:, 0])]
                assert len(places) == 1
                chosen |= set(places)
        assert chosen == {0, 1, 2, 3}
        picture = clip_batch(0, num_frames=1)
        assert torch.equal(task._pixels(picture, SampleRng.of(0, 0)), to_pixels(picture.pixels_BTHWC))


@pytest.mark.parametrize(
    ("kind", "tokens"), [("hunyuan", 2 * 3 * 4 * 4), ("dc_ae", 2 * 2 * 8 * 8), ("flux_ae", 2 * 2 * 8 * 8)]
)
def test_tokens_and_samples(kind, tokens):
    task, batch = vae_task(kind), clip_batch(0, num_frames=NUM_FRAMES[kind])
    assert task.tokens(batch) == tokens


def test_a_perceptual_term_without_weights_is_off_with_a_warning():
    settings, listener = TrainSettings.model_validate({"target": "vae", "vae": VAES["hunyuan"]}), Listener()
    assert VAETask.new(settings, device=CPU, reporter=listener).adversary is None
    assert listener.warnings == []
    task = VAETask.new(settings.replace({"train_vae.perceptual_weight": 0.5}), device=CPU, reporter=listener)
    assert len(listener.warnings) == 1
    assert "the perceptual term is off" in listener.warnings[0]
    assert "lpips" not in task.loss(clip_batch(0, num_frames=5, size=32), SampleRng.of(0, 0))[1]


class TestCrops:
    @staticmethod
    def seen(task, batch, number):
        return task._pixels(batch, SampleRng.of(0, number))

    def test_they_are_squares_from_anywhere_in_their_clip(self):
        task = vae_task("hunyuan", crop_size=8)
        batch, corners = clip_batch(0, num_frames=5, size=16), set()
        clips = to_pixels(batch.pixels_BTHWC)
        for number in range(40):
            squares = self.seen(task, batch, number)
            assert squares.shape == (2, 3, 5, 8, 8)
            for clip, square in zip(clips, squares, strict=True):
                where = [
                    (top, left)
                    for top in range(9)
                    for left in range(9)
                    if torch.equal(clip[:, :, top : top + 8, left : left + 8], square)
                ]
                assert where
                corners |= set(where)
        assert {top for top, _ in corners} == {left for _, left in corners} == set(range(9))

    def test_a_side_that_is_shorter_stays(self):
        frames = torch.arange(1 * 2 * 4 * 12 * 3).view(1, 2, 4, 12, 3).to(torch.uint8)
        square = cut_squares(frames, 8, np.random.default_rng(0))
        assert square.shape == (1, 2, 4, 8, 3)

    def test_every_validation_sees_whole_clips(self):
        task, batch = vae_task("hunyuan", crop_size=8), clip_batch(0, num_frames=5, size=16)
        with torch.no_grad():
            assert self.seen(task, batch, 0).shape[-1] == 16


def test_pixels():
    frames = torch.zeros(1, 2, 4, 3, 3, dtype=torch.uint8)
    frames[0, 1, 2, 0] = torch.tensor([255, 51, 0])
    pixels = to_pixels(frames)
    assert pixels.shape == (1, 3, 2, 4, 3)
    assert_close(pixels[0, :, 1, 2, 0], torch.tensor([1.0, -0.6, -1.0]))
    assert pixels.is_contiguous(memory_format=torch.channels_last_3d)
