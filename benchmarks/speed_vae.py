"""Part of `speed.py` about the autoencoder: time and memory of encoding and decoding."""

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from plain_vae import plain_decode, plain_encode
from speed_pairs import Row, compared
from torch import Tensor

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.resample import lay_out_kernels
from opensora_cli.models.vae.tiles import Tiling

GOALS = {"encode": 1.3, "decode": 1.5}
MOST_MEMORY = 0.7
_DEMO = HunyuanVAEConfig(
    block_out_channels=(16, 32, 96),
    layers_per_block=1,
    norm_num_groups=4,
    sample_size=32,
    sample_tsize=16,
    scale_factor=1.0,
    spatial_compression_ratio=4,
)
# With the released widths a clip would take many minutes.
_QUARTER = HunyuanVAEConfig(block_out_channels=(32, 64, 128, 128), norm_num_groups=8, sample_size=128, sample_tsize=16)
SIZES = {64: ("demo", _DEMO), 256: ("released, 1/4 of widths", _QUARTER)}


def measure_vae(options: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for random weights of two sizes, 17 and 33 frames, whole and in tiles. The note has the ratio of the
    peaks of counted tensors, and the relative error.
    """
    for pixels in options.pixels or SIZES:
        name, config = SIZES[pixels]
        torch.manual_seed(0)
        plain_vae = HunyuanVAE(config).requires_grad_(False).eval()
        vae = copy.deepcopy(plain_vae)
        lay_out_kernels(vae, torch.device("cpu"))  # like loading
        for num_frames in (17, 33):
            clip = torch.rand(1, 3, num_frames, pixels, pixels) * 2 - 1
            for tiling in (Tiling(), Tiling(spatial=True, temporal=True)):
                tiles = f", tiles of {config.sample_size}px" if tiling.spatial else ""
                # Few pairs are enough for a long clip.
                pairs = min(options.pairs, 3) if pixels > 64 else options.pairs
                title = f"{name}, {num_frames}x{pixels}px{tiles}"
                yield from _both(plain_vae, vae, clip, tiling, pairs=pairs, title=title)


@torch.inference_mode()
def _both(
    plain_vae: HunyuanVAE, vae: HunyuanVAE, clip_BCTHW: Tensor, tiling: Tiling, *, pairs: int, title: str
) -> Iterator[Row]:
    latents_BCTHW = vae.encode(clip_BCTHW, tiling=tiling)
    for name, given, plain_way, our_way in (
        ("encode", clip_BCTHW, plain_encode, vae.encode),
        ("decode", latents_BCTHW, plain_decode, vae.decode),
    ):
        plain, ours = partial(plain_way, plain_vae, given, tiling=tiling), partial(our_way, given, tiling=tiling)
        (expected, plain_bytes), (actual, our_bytes) = _counted(plain), _counted(ours)
        error = float((actual - expected).norm() / expected.norm())
        memory = our_bytes / plain_bytes
        yield compared(
            f"{name} {title}",
            plain,
            ours,
            pairs=pairs,
            goal=GOALS[name],
            note=f"memory {memory:.2f} (at most {MOST_MEMORY}), relative error {error:.1e}",
            figures={"error": error, "memory": memory, "plain_bytes": plain_bytes, "bytes": our_bytes},
        )


def _counted(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    with TensorBytes() as counter:
        return run(), counter.peak_bytes
