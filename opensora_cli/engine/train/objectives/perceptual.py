"""LPIPS, the perceptual distance between two pictures in the features of a classifier."""

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

# Widths of VGG16's convolutions by stage; the resolution halves between stages.
_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# Mean and deviation of ImageNet's colors, for pixels in [-1,1] instead of [0,1].
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
_NORM_EPS = 1e-10

# Layers are counted as in `torchvision.models.vgg16().features`, alone or inside a saved `lpips.LPIPS`.
_FEATURE_KEY = re.compile(r"(?:.*\.)?(?:features|slice\d)\.(\d+)\.(weight|bias)")
_LINEAR_KEY = re.compile(r"(?:.*\.)?lin(\d)\.model\.\d\.weight")


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

    Known files are torchvision's `vgg16-397923af.pth` (keys `features.0.weight` to `features.28.bias`; the classifier
    is not read) and the linear layers of LPIPS version 0.1, `vgg.pth` (keys `lin0.model.1.weight` to
    `lin4.model.1.weight`). One file of a whole `lpips.LPIPS(net="vgg")`, and any of these as safetensors, work, too.
    Raises CheckpointError if a file is missing or broken, or if weights are missing or have another shape.
    """
    found: dict[str, LazyTensor] = {}
    for path in paths:
        for key, entry in open_checkpoint(path).entries.items():
            name = _name_of(key)
            if name is not None:
                found[name] = entry
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


def _name_of(key: str) -> str | None:
    """Return the name in this module of a tensor in a file, or None if it is not needed."""
    if match := _FEATURE_KEY.fullmatch(key):
        return f"features.{match[1]}.{match[2]}"
    if match := _LINEAR_KEY.fullmatch(key):
        return f"lins.{match[1]}"
    return None


def _vgg16_features() -> nn.Sequential:
    """Return the layers of VGG16 up to the last stage, with the indexes that their keys have in files."""
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
