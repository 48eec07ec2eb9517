"""Terms of the autoencoder's loss: errors of pixels, LPIPS, the KL divergence, and a discriminator."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.load import differences
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.device import queued_copy
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.train.trainer import Role
from opensora_cli.models.vae.dc_ae import ClipConv3d
from opensora_cli.models.vae.resample import GroupNorm
from opensora_cli.settings.train_sections import DiscriminatorSettings, OptimizerName, OptimizerSettings

_PIXEL_RANGE = 2.0  # from -1 to 1
_EPS = 1e-4
_MAX_WEIGHT = 1e4

# Widths of VGG16's convolutions by stage; the resolution halves between stages.
_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# Mean and deviation of ImageNet's colors, for pixels in [-1,1] instead of [0,1].
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_NORM_EPS = 1e-10
# Layers are counted as in `torchvision.models.vgg16().features`, alone or inside a saved `lpips.LPIPS`.
_FEATURE_KEY = re.compile(r"(?:.*\.)?(?:features|slice\d)\.(\d+)\.(weight|bias)")
_LINEAR_KEY = re.compile(r"(?:.*\.)?lin(\d)\.model\.\d\.weight")

_SLOPE = 0.2
_INITIAL_DEVIATION = 0.02
_MAX_WIDTH_FACTOR = 8
_CHANNELS_PER_GROUP = 8


def gradient_error(decoded_BCTHW: Tensor, pixels_BCTHW: Tensor) -> Tensor:
    """Return the mean absolute error of differences between adjacent pixels, horizontal plus vertical.

    A blurred edge has a small error in its pixels and a large one in its gradients (Mathieu et al. 2016,
    https://arxiv.org/abs/1511.05440, with absolute gradients).
    """
    error_BCTHW = decoded_BCTHW - pixels_BCTHW
    return error_BCTHW.diff(dim=-1).abs().mean() + error_BCTHW.diff(dim=-2).abs().mean()


def psnr(squared_error: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio, in dB, of pixels in [-1,1] with this mean squared error."""
    return -10.0 * torch.log10(squared_error / _PIXEL_RANGE**2)


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Return the KL divergence from normal distributions to the standard one, in nats, as the mean over all values.

    KL(N(m, s²) || N(0, 1)) = (m² + s² - 1 - log s²) / 2 (Kingma & Welling 2014, appendix B); `logvar` is log s².
    """
    return 0.5 * (mean.square() + logvar.exp() - 1.0 - logvar).mean()


class PerceptualDistance(nn.Module):
    """LPIPS with VGG16 (Zhang et al. 2018, https://arxiv.org/abs/1801.03924; version 0.1 of its weights).

    After each of VGG16's five stages, the features of every position are scaled to length 1. Their squared differences,
    weighted by channel, are averaged over positions and summed over stages. Weights are random until they are loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = _vgg16_features()
        self.lins = nn.ParameterList(torch.ones(widths[-1]) for widths in _STAGES)

    def forward(self, made_BCTHW: Tensor, real_BCTHW: Tensor) -> Tensor:
        """Return the mean distance over all frames in fp32; 0 for equal frames.

        Both are RGB clips in [-1,1] of at least 16 x 16 pixels. Gradients flow only to `made_BCTHW`.
        """
        with torch.no_grad():
            real = list(self._stages(real_BCTHW))
        total = torch.zeros((), device=made_BCTHW.device)
        for made_NCHW, real_NCHW, weight_C in zip(self._stages(made_BCTHW), real, self.lins, strict=True):
            squared_NCHW = (_of_length_one(made_NCHW) - _of_length_one(real_NCHW)).square()
            total = total + (squared_NCHW * weight_C.view(-1, 1, 1)).sum(dim=1).mean()
        return total

    def _stages(self, pixels_BCTHW: Tensor) -> Iterator[Tensor]:
        """Yield the output of each stage, with frames as the batch."""
        hidden_NCHW = pixels_BCTHW.transpose(1, 2).flatten(0, 1)
        shift_C11, scale_C11 = (
            queued_copy(torch.tensor(color, dtype=hidden_NCHW.dtype).view(3, 1, 1), hidden_NCHW.device)
            for color in (_SHIFT, _SCALE)
        )
        hidden_NCHW = (hidden_NCHW - shift_C11) / scale_C11
        for layer in self.features:
            if isinstance(layer, nn.MaxPool2d):
                yield hidden_NCHW
            hidden_NCHW = layer(hidden_NCHW)
        yield hidden_NCHW


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


def _vgg16_features() -> nn.Sequential:
    """Return the layers up to the last stage, with the indexes that their keys have in files."""
    layers: list[nn.Module] = []
    channels = 3
    for widths in _STAGES:
        layers += [nn.MaxPool2d(2)] if layers else []
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return nn.Sequential(*layers)


def _of_length_one(features_NCHW: Tensor) -> Tensor:
    features_NCHW = features_NCHW.float()
    length_N1HW: Tensor = torch.linalg.vector_norm(features_NCHW, dim=1, keepdim=True)
    return features_NCHW / (length_N1HW + _NORM_EPS)


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


def hinge_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Return a discriminator's hinge loss (Lim & Ye 2017, https://arxiv.org/abs/1705.02894)."""
    return 0.5 * (nn.functional.relu(1.0 - real_logits).mean() + nn.functional.relu(1.0 + fake_logits).mean())


def _conv(before: int, after: int, *, stride: int = 1, bias: bool = True) -> nn.Conv3d:
    conv = ClipConv3d(before, after, 3, stride=stride, padding=1, bias=bias)
    nn.init.normal_(conv.weight, std=_INITIAL_DEVIATION)
    return conv


def discriminator_role(settings: DiscriminatorSettings, *, optimizer: OptimizerSettings) -> Role:
    """Return a discriminator with AdamW, whose learning rate follows the schedule of the autoencoder's `optimizer`."""
    factor = settings.learning_rate / optimizer.learning_rate
    own = optimizer.replace(
        {
            "name": OptimizerName.ADAMW,
            "learning_rate": settings.learning_rate,
            # A rounding error must not exceed the rate, which validation would refuse.
            "initial_learning_rate": min(factor * optimizer.initial_learning_rate, settings.learning_rate),
            "final_learning_rate": min(factor * optimizer.final_learning_rate, settings.learning_rate),
        }
    )
    return Role(PatchDiscriminator3d(width=settings.width, layers=settings.layers), own)


def gradient_norm(output: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the norm of a loss's gradient by a weight, in fp32, from its gradient by an output of the layer."""
    (by_weight,) = torch.autograd.grad(output, weight, gradient, retain_graph=True)
    norm: Tensor = torch.linalg.vector_norm(by_weight.float())
    return norm


def adaptive_weight(reconstruction_norm: Tensor, adversarial_norm: Tensor) -> Tensor:
    """Return the weight that gives the adversarial term the same gradient norm at the last layer as the reconstruction.

    It is |g_rec| / (|g_adv| + 1e-4), at most 1e4 (Esser et al. 2021, "Taming transformers",
    https://arxiv.org/abs/2012.09841, equation 7).
    """
    return (reconstruction_norm / (adversarial_norm + _EPS)).clamp(max=_MAX_WEIGHT)


def with_gradient(output: Tensor, *, value: Tensor, gradient: Tensor) -> Tensor:
    """Return the scalar loss `value` as a function of `output` with the known `gradient`.

    So the backward pass of a loss on decoded pixels continues through the decoder after the loss's own activations are
    freed.
    """
    linear = (output * gradient.detach()).sum()
    return value.detach() + (linear - linear.detach())
