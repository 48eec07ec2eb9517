"""Matmuls in 8 bits in the transformer's linear layers on a GPU: check that they work, use them, report the error."""

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import Self

import torch
from torch import nn

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.device import capability, device_name, has_gpu, is_gpu
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.memory.eight_bit import ProductError, output_and_rounded_product, use_products
from opensora_cli.models.linears import LowRankLinear
from opensora_cli.models.mmdit.blocks import RepeatedBlocks, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import shares

_NEEDED = {LinearProducts.INT8: (8, 0), LinearProducts.FP8: (8, 9)}
"""Lowest compute capability."""
_MULTIPLE = {LinearProducts.INT8: 8, LinearProducts.FP8: 16}
"""Divisor of the sizes of a layer."""
_TOLERANCE = 0.02
"""Largest relative error of the small product, which bfloat16 rounds once."""
_USE_EXACT = "use --set precision.linear=exact"


class LinearProductsReport(Document):
    """Layers that multiply in 8 bits, and the error of their products."""

    kind: LinearProducts
    layers: int
    relative_error: float
    """Root mean square over all layers of the error relative to the result, for normally distributed inputs."""
    largest_relative_error: float
    """Error of the layer `largest_at`."""
    largest_at: str

    @classmethod
    def of(cls, kind: LinearProducts, errors: Sequence[ProductError]) -> Self:
        """Return the report for the errors of all replaced layers, at least one."""
        worst = max(errors, key=lambda error: error.relative_error)
        mean = sqrt(sum(error.relative_error**2 for error in errors) / len(errors))
        largest, path = worst.relative_error, worst.path
        return cls(kind=kind, layers=len(errors), relative_error=mean, largest_relative_error=largest, largest_at=path)

    def line(self) -> str:
        """Return the report as a line of text."""
        return (
            f"{self.layers} linear layers multiply in {self.kind}: sampled products are off by "
            f"{self.relative_error:.2%}, those of {self.largest_at} by {self.largest_relative_error:.2%}"
        )


def require_products(
    kind: LinearProducts,
    config: MMDiTConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tensor: int = 1,
    tries_device: bool = True,
) -> None:
    """Check that `precision.linear` works on a device and with a model; this machine may lack the device of a plan.

    `tensor` ranks share each block. `tries_device` says whether this process may use the device.
    """
    if not is_gpu(device):
        raise HardwareError(
            f"precision.linear={kind} needs an NVIDIA GPU, and this run is on {device.type}", hint=_USE_EXACT
        )
    _require_sizes(kind, config, tensor)
    if kind is LinearProducts.FP8 and dtype is not torch.bfloat16:
        raise RequestError("precision.linear=fp8 gives bfloat16: use it with --set runtime.dtype=bfloat16")
    if not has_gpu():
        return
    found, needed = capability(device), _NEEDED[kind]
    if found < needed:
        raise HardwareError(
            f"precision.linear={kind} needs compute capability {needed[0]}.{needed[1]}, and "
            f"{device_name(device)} has {found[0]}.{found[1]}",
            hint="use --set precision.linear=int8" if found >= _NEEDED[LinearProducts.INT8] else _USE_EXACT,
        )
    if tries_device and (problem := _why_unusable(kind, device, dtype)) is not None:
        raise HardwareError(f"precision.linear={kind} does not work here: {problem}", hint=_USE_EXACT)


def use_in_block(block: nn.Module, stack: RepeatedBlocks, kind: LinearProducts) -> list[ProductError]:
    """Replace the linear layers of one block, sharded or with adapters or not, and return the error of each product."""
    return use_products(block, [_path_of_weight(block, linear.path) for linear in stack.linears], kind)


def _path_of_weight(block: nn.Module, path: str) -> str:
    from opensora_cli.parallel.tensor import ColumnLinear, RowLinear

    module = block.get_submodule(path)
    for wrapper, inside in ((ColumnLinear, "linear"), (RowLinear, "linear"), (LowRankLinear, "base")):
        if isinstance(module, wrapper):
            return _path_of_weight(block, f"{path}.{inside}")
    return path


def _require_sizes(kind: LinearProducts, config: MMDiTConfig, tensor: int) -> None:
    """Raise RequestError if a kernel refuses the size of a layer, or of the share of a rank."""
    multiple = _MULTIPLE[kind]
    sizes = {config.hidden_size}
    for stack in repeated_blocks(config):
        for linear in stack.linears:
            of_ranks = [
                [unit * count for count in shares(piece // unit, tensor)]
                for piece, unit in zip(linear.pieces, linear.units, strict=True)
            ]
            sizes |= set(map(sum, zip(*of_ranks, strict=True)))
            # With chunks of tokens, values and the MLP are separate products.
            sizes |= {size for piece in of_ranks for size in piece}
    unfit = sorted(size for size in sizes if size % multiple)
    if unfit:
        raise RequestError(
            f"precision.linear={kind} needs layers whose sizes are multiples of {multiple}, and some here have "
            f"{unfit[0]} features: {_USE_EXACT}"
        )


@lru_cache(maxsize=8)
def _why_unusable(kind: LinearProducts, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why a small product on the device is wrong, or None."""
    # The random numbers of the run stay as they are.
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        block = nn.Sequential(nn.Linear(64, 48, dtype=dtype).requires_grad_(False))
        tokens = torch.randn(40, 64, dtype=dtype)
        try:
            use_products(block, ["0"], kind)
            found, expected = output_and_rounded_product(block.to(device)[0], tokens.to(device))
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            return str(error).strip().splitlines()[0]
    off = float((found - expected).norm() / expected.norm())
    return None if off <= _TOLERANCE else f"a small product is off by {off:.1%}"
