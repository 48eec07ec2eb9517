"""Objective `vae`: errors of pixels, KL divergence, a perceptual term (LPIPS), and a discriminator."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.load import differences, fill_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.device import queued_copy
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.data.batches import ClipBatch, SampleRng
from opensora_cli.engine.components.architectures import autoencoder_on_meta, new_autoencoder
from opensora_cli.engine.encode.clip_cache import ClipCache
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import find_first_weights
from opensora_cli.engine.train.memory import BatchShape
from opensora_cli.engine.train.objectives import Objective, TokenWeights
from opensora_cli.engine.train.trainer import MODEL, Losses, Role
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.dc_ae import ClipConv3d
from opensora_cli.models.vae.resample import GroupNorm
from opensora_cli.settings.train import VAE_FILE, TrainSettings
from opensora_cli.settings.train_sections import (
    DiscriminatorSettings,
    OptimizerName,
    OptimizerSettings,
    VAETrainSettings,
)

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_PIXEL_RANGE = 2.0  # from -1 to 1
_MAX_WEIGHT = 1e4

# Widths of VGG16's convolutions by stage; the resolution halves between stages.
_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# Mean and deviation of ImageNet's colors, for pixels in [-1,1] instead of [0,1].
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
# Layers are counted as in `torchvision.models.vgg16().features`, alone or inside a saved `lpips.LPIPS`.
_FEATURE_KEY = re.compile(r"(?:.*\.)?(?:features|slice\d)\.(\d+)\.(weight|bias)")
_LINEAR_KEY = re.compile(r"(?:.*\.)?lin(\d)\.model\.\d\.weight")

_SLOPE = 0.2
_INITIAL_DEVIATION = 0.02
_MAX_WIDTH_FACTOR = 8
_CHANNELS_PER_GROUP = 8


class VAETask(Objective):
    """Training task that reconstructs clips and pictures.

    The loss is |error| + a·error² + b·|error of gradients| + c·LPIPS + d·KL + e·w·(-logit), all means. The logit is
    that of the discriminator, and w balances the gradients of both parts.
    """

    module: Autoencoder
    adversary: Role | None

    def __init__(
        self,
        autoencoder: Autoencoder,
        *,
        settings: VAETrainSettings,
        perceptual: "PerceptualDistance | None" = None,
        adversary: Role | None = None,
    ) -> None:
        super().__init__(autoencoder, roles={} if adversary is None else {"adversary": adversary})
        self.adversary, self._settings, self._perceptual = adversary, settings, perceptual
        self._is_opposed = False

    @classmethod
    def build(
        cls,
        settings: TrainSettings,
        *,
        distribution: Distribution,
        clips: ClipCache | None,
        token_weights: TokenWeights | None,
        reporter: Reporter,
    ) -> Self:
        task = cls.new(settings, device=distribution.device, reporter=reporter)
        if (path := find_first_weights(settings)) is not None:
            fill_module(task.module, open_checkpoint(path))
        # A distribution moves trained weights, but not a frozen encoder.
        task.module.to(distribution.device)
        return task

    @classmethod
    def stand_in(cls, settings: TrainSettings) -> tuple[Self, list[nn.Module]]:
        without_files = settings.replace({"train_vae.perceptual_files": (), "train_vae.perceptual_weight": 0.0})
        return cls.new(without_files, device=torch.device("cpu"), reporter=SilentReporter()), []

    @classmethod
    def new(cls, settings: TrainSettings, *, device: torch.device, reporter: Reporter) -> Self:
        chosen, perceptual, adversary = settings.train_vae, None, None
        if chosen.perceptual_files:
            perceptual = load_perceptual_distance([Path(file) for file in chosen.perceptual_files]).to(device)
        elif chosen.perceptual_weight:
            reporter.warn(
                f"train_vae.perceptual_weight={chosen.perceptual_weight:g}, but the perceptual term is off: "
                "train_vae.perceptual_files names no weights"
            )
        autoencoder = new_autoencoder(settings.vae)
        if chosen.decoder_only:
            _freeze_encoder(autoencoder)
        if device.type == "cpu":
            # This memory format is fast for convolutions there.
            for weight in autoencoder.parameters():
                if weight.ndim in _CHANNELS_LAST:
                    weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])
        if chosen.discriminator.weight:
            adversary = discriminator_role(chosen.discriminator, optimizer=settings.optimizer)
        return cls(autoencoder, settings=chosen, perceptual=perceptual, adversary=adversary)

    @classmethod
    def outline(cls, settings: TrainSettings) -> Autoencoder:
        autoencoder = autoencoder_on_meta(settings.vae)
        if settings.train_vae.decoder_only:
            _freeze_encoder(autoencoder)
        return autoencoder

    @classmethod
    def layer_values(cls, settings: TrainSettings, shape: BatchShape) -> int:
        return shape.batch_size * shape.num_frames * shape.height * shape.width * settings.vae.sizes.pixel_width

    @classmethod
    def measured_steps(cls, settings: TrainSettings) -> tuple[int, ...]:
        """Return the first two steps, or the first and one with the discriminator."""
        discriminator = settings.train_vae.discriminator
        opposed_from = discriminator.start_step if discriminator.weight else 0
        return (0, 0, opposed_from) if opposed_from else (0, 1)

    def begin_step(self, step: int) -> None:
        self._is_opposed = self.adversary is not None and step >= self._settings.discriminator.start_step

    def loss(self, batch: ClipBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch of clips or pictures, with PSNR (dB), KL (nats per latent value) and more.

        Without gradients, the adversarial term is dropped and clips stay whole, so that losses of different steps and
        runs can be compared.
        """
        return self._reconstruct(self._pixels(batch, rng), rng)[:2]

    def losses(self, batch: ClipBatch, rng: SampleRng) -> Losses:
        """Yield the autoencoder's loss, and the discriminator's on the same clips once it has started."""
        pixels = self._pixels(batch, rng)
        loss, figures, made = self._reconstruct(pixels, rng)
        yield MODEL, loss, figures
        if self._is_opposed and self.adversary is not None:
            # One pass for both: DDP needs one forward for each backward.
            real, fake = self.adversary.forward(torch.cat([pixels, made])).float().chunk(2)
            means = {"real_logit": real.detach().mean(), "made_logit": fake.detach().mean()}
            # Hinge loss (Lim & Ye 2017, arXiv 1705.02894).
            hinge = 0.5 * (nn.functional.relu(1.0 - real).mean() + nn.functional.relu(1.0 + fake).mean())
            yield "adversary", hinge, means

    def tokens(self, batch: ClipBatch) -> int:
        one, grid, crop = batch.requests[0], self.module.grid, self._settings.crop_size
        rows, columns = grid.latent_size(*(min(side, crop or side) for side in (one.height, one.width)))
        return len(batch.requests) * grid.latent_frames(one.num_frames) * rows * columns

    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        dtype = torch.float16 if self._settings.export_half else torch.float32
        write_weights(folder / VAE_FILE, weights, dtype=dtype)

    def _reconstruct(self, pixels: Tensor, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        made, mean, logvar = self.forward(pixels, generator=rng.torch)
        loss, figures = self._pixel_loss(made.float(), pixels)
        if logvar is not None:
            # From normal distributions to the standard one, in nats (Kingma & Welling 2014, appendix B).
            mean, logvar = mean.float(), logvar.float()
            kl = 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()
            loss = loss + self._settings.kl_weight * kl
            figures["kl"] = kl.detach()
        return loss, figures, made.detach()

    def _pixel_loss(self, made: Tensor, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the decoded pixels. Its gradient by the pixels is computed immediately, term by term."""
        if not torch.is_grad_enabled():
            return self._reconstruction_loss(made, pixels)
        # The backward pass ends at this leaf, and frees the activations of LPIPS and the discriminator.
        leaf = made.detach().requires_grad_()
        value, figures = self._reconstruction_loss(leaf, pixels)
        (gradient,) = torch.autograd.grad(value, leaf)
        if self._is_opposed and self.adversary is not None:
            # Differentiated only by the clips, so that the discriminator gets no gradient, and DDP starts no exchange.
            generator_loss = -self.adversary.module(leaf).float().mean()
            (against,) = torch.autograd.grad(generator_loss, leaf)
            # Both terms get the same gradient norm at the last layer (Esser et al. 2021, arXiv 2012.09841, equation 7).
            reconstruction, adversarial = (
                torch.linalg.vector_norm(
                    torch.autograd.grad(made, self.module.last_layer.weight, each, retain_graph=True)[0].float()
                )
                for each in (gradient, against)
            )
            balance = (reconstruction / (adversarial + 1e-4)).clamp(max=_MAX_WEIGHT)
            weight = self._settings.discriminator.weight * balance
            value = value.detach() + weight * generator_loss.detach()
            gradient = gradient + weight * against
            figures |= {"adversarial": generator_loss.detach(), "adversarial_weight": weight}
        # The loss as a function of the pixels with this gradient: backward continues through the decoder.
        linear = (made * gradient.detach()).sum()
        return value.detach() + (linear - linear.detach()), figures

    def _reconstruction_loss(self, made: Tensor, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self._settings
        squared = nn.functional.mse_loss(made, pixels)
        loss = nn.functional.l1_loss(made, pixels) + settings.squared_error_weight * squared
        figures = {"psnr": -10.0 * torch.log10(squared.detach() / _PIXEL_RANGE**2)}
        if settings.gradient_weight:
            # A blurred edge has a small error in its pixels and a large one in its gradients (Mathieu et al. 2016,
            # arXiv 1511.05440, with absolute gradients).
            error = made - pixels
            edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
            loss = loss + settings.gradient_weight * edges
        if self._perceptual is not None:
            distance = self._perceptual(made, pixels)
            loss = loss + settings.perceptual_weight * distance
            figures["lpips"] = distance.detach()
        return loss, figures

    def _pixels(self, batch: ClipBatch, rng: SampleRng) -> Tensor:
        frames = batch.pixels_BTHWC
        assert frames is not None, "autoencoders learn from pixels"
        count, num_frames = frames.shape[:2]
        share = self._settings.single_frame_share if torch.is_grad_enabled() else 0.0
        if share and num_frames > 1 and rng.numpy.random() < share:
            frames = frames[torch.arange(count), rng.numpy.integers(num_frames, size=count)].unsqueeze(1)
        if self._settings.crop_size and torch.is_grad_enabled():
            frames = cut_squares(frames, self._settings.crop_size, rng.numpy)
        return to_pixels(queued_copy(frames, next(self.module.parameters()).device))


OBJECTIVE = VAETask


def _freeze_encoder(autoencoder: Autoencoder) -> None:
    for name, weight in autoencoder.named_parameters():
        weight.requires_grad_(name.startswith(("decoder.", "post_quant_conv.")))


def to_pixels(frames_BTHWC: Tensor) -> Tensor:
    """Return uint8 clips (B,T,H,W,3) as pixels (B,3,T,H,W) in [-1,1], in the fast memory format of their device."""
    pixels = frames_BTHWC.permute(0, 4, 1, 2, 3).to(torch.float32) / 127.5 - 1.0
    is_on_cpu = pixels.device.type == "cpu"
    return pixels.contiguous(memory_format=torch.channels_last_3d if is_on_cpu else torch.contiguous_format)


def cut_squares(frames_BTHWC: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """Return a random square crop of every clip. Sides shorter than `size` are kept whole."""
    count, _, height, width, _ = frames_BTHWC.shape
    tops, lefts = (rng.integers(max(side - size, 0) + 1, size=count) for side in (height, width))
    crops = zip(frames_BTHWC, tops, lefts, strict=True)
    return torch.stack([clip_THWC[:, top : top + size, left : left + size] for clip_THWC, top, left in crops])


class PerceptualDistance(nn.Module):
    """LPIPS with VGG16 (Zhang et al. 2018, https://arxiv.org/abs/1801.03924; version 0.1 of its weights).

    After each of VGG16's five stages, the features of every position are scaled to length 1. Their squared differences,
    weighted by channel, are averaged over positions and summed over stages. Weights are random until they are loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        # The indexes of the layers are those of their keys in files.
        layers: list[nn.Module] = []
        channels = 3
        for widths in _STAGES:
            layers += [nn.MaxPool2d(2)] if layers else []
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        self.lins = nn.ParameterList(torch.ones(widths[-1]) for widths in _STAGES)

    def forward(self, made_BCTHW: Tensor, real_BCTHW: Tensor) -> Tensor:
        """Return the mean distance over all frames in fp32; 0 for equal frames.

        Both are RGB clips in [-1,1] of at least 16 x 16 pixels. Gradients flow only to `made_BCTHW`.
        """
        with torch.no_grad():
            real = list(self._stages(real_BCTHW))
        total = torch.zeros((), device=made_BCTHW.device)
        for made_NCHW, real_NCHW, weight_C in zip(self._stages(made_BCTHW), real, self.lins, strict=True):
            squared_NCHW = (made_NCHW - real_NCHW).square()
            total = total + (squared_NCHW * weight_C.view(-1, 1, 1)).sum(dim=1).mean()
        return total

    def _stages(self, pixels_BCTHW: Tensor) -> Iterator[Tensor]:
        """Yield the normalized output of each stage, with frames as the batch."""
        hidden_NCHW = pixels_BCTHW.transpose(1, 2).flatten(0, 1)
        shift_C11, scale_C11 = (
            queued_copy(torch.tensor(color, dtype=hidden_NCHW.dtype).view(3, 1, 1), hidden_NCHW.device)
            for color in (_SHIFT, _SCALE)
        )
        hidden_NCHW = (hidden_NCHW - shift_C11) / scale_C11
        for layer in self.features:
            if isinstance(layer, nn.MaxPool2d):
                yield _of_length_one(hidden_NCHW)
            hidden_NCHW = layer(hidden_NCHW)
        yield _of_length_one(hidden_NCHW)


def _of_length_one(features_NCHW: Tensor) -> Tensor:
    features_NCHW = features_NCHW.float()
    length_N1HW: Tensor = torch.linalg.vector_norm(features_NCHW, dim=1, keepdim=True)
    return features_NCHW / (length_N1HW + 1e-10)


def load_perceptual_distance(paths: Sequence[Path]) -> PerceptualDistance:
    """Return the distance, frozen, with the weights from all files.

    Known files are torchvision's `vgg16-397923af.pth` (`features.0.weight` to `features.28.bias`) and the linear layers
    of LPIPS version 0.1, `vgg.pth` (`lin0.model.1.weight` to `lin4.model.1.weight`). A whole `lpips.LPIPS(net="vgg")`,
    and any of these as safetensors, work, too. Raises CheckpointError if a file or a weight is missing or wrong.
    """
    found: dict[str, LazyTensor] = {}
    for path in paths:
        for key, entry in open_checkpoint(path).entries.items():
            if match := _FEATURE_KEY.fullmatch(key):
                found[f"features.{match[1]}.{match[2]}"] = entry
            elif match := _LINEAR_KEY.fullmatch(key):
                found[f"lins.{match[1]}"] = entry
    with torch.device("meta"):
        distance = PerceptualDistance()
    expected = {name: tuple(weight.shape) for name, weight in distance.state_dict().items()}
    # In the file, a linear layer is a convolution with one output: (1, C, 1, 1).
    shapes = {
        name: entry.shape[1:2] if name.startswith("lins.") and len(entry.shape) == 4 else entry.shape
        for name, entry in found.items()
    }
    problems = differences(shapes, expected)
    if problems:
        raise CheckpointError(
            f"train_vae.perceptual_files={','.join(map(str, paths))} are not LPIPS with VGG16: {'; '.join(problems)}",
            hint="name torchvision's vgg16-397923af.pth and vgg.pth of LPIPS 0.1, with a comma between",
        )
    weights = {name: found[name].read().float().view(shape) for name, shape in expected.items()}
    distance.load_state_dict(weights, assign=True)
    return distance.requires_grad_(False).eval()


class PatchDiscriminator3d(nn.Module):
    """PatchGAN (Isola et al. 2017, https://arxiv.org/abs/1611.07004, section 3.2.2) in three dimensions.

    Kernels have 3 taps along every axis instead of 4, so that clips of any size work, even a single frame. Norms are
    group norms, which need no second sample in the batch.

    Args:
        width: channels after the first layer, a multiple of 8. They double with every layer, up to 8 times `width`.
        layers: number of strided layers, at least 1; each halves time, height and width, rounded up.
    """

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        widths = [width * min(2**layer, _MAX_WIDTH_FACTOR) for layer in range(layers + 1)]
        stack: list[nn.Module] = [_conv(3, width, stride=2), nn.LeakyReLU(_SLOPE)]
        for layer in range(1, layers + 1):
            stack += [
                _conv(widths[layer - 1], widths[layer], stride=2 if layer < layers else 1, bias=False),
                GroupNorm(widths[layer] // _CHANNELS_PER_GROUP, widths[layer]),
                nn.LeakyReLU(_SLOPE),
            ]
        self.layers = nn.Sequential(*stack, _conv(widths[-1], 1))

    def forward(self, pixels_BCTHW: Tensor) -> Tensor:
        """Return logits (B,1,t,h,w) of the patches of RGB clips in [-1,1]; high means real."""
        logits_B1THW: Tensor = self.layers(pixels_BCTHW)
        return logits_B1THW


def _conv(before: int, after: int, *, stride: int = 1, bias: bool = True) -> nn.Conv3d:
    conv = ClipConv3d(before, after, 3, stride=stride, padding=1, bias=bias)
    nn.init.normal_(conv.weight, std=_INITIAL_DEVIATION)
    return conv


def discriminator_role(settings: DiscriminatorSettings, *, optimizer: OptimizerSettings) -> Role:
    """Return a discriminator with AdamW, whose learning rate follows the schedule of the autoencoder's `optimizer`."""
    own = optimizer.replace({"name": OptimizerName.ADAMW, "learning_rate": settings.learning_rate})
    return Role(PatchDiscriminator3d(width=settings.width, layers=settings.layers), own)
