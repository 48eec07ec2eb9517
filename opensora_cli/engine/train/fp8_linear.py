"""Linear layers whose three products of matrices are in 8 bits (Micikevicius et al. 2022), for training.

Weights stay as they are. What goes into a product is scaled by its largest number and rounded: inputs and weights to
float8_e4m3fn, gradients, which need range more than precision, to float8_e5m2. Sums are in float32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from opensora_cli.core.exceptions import HardwareError, RequestError

_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_NEEDED = (8, 9)
_MULTIPLE = 16
"""Of every inner and outer size of a product, but the number of its first rows."""


def require_fp8(device: torch.device) -> None:
    """Check that a device multiplies in 8 bits. Raises HardwareError if it does not."""
    if device.type != "cuda":
        raise HardwareError(
            f"precision.fp8_linears=true needs an NVIDIA GPU, and this run is on {device.type}",
            hint="use --set precision.fp8_linears=false",
        )
    found = torch.cuda.get_device_capability(device)
    if found < _NEEDED:
        raise HardwareError(
            f"precision.fp8_linears=true needs compute capability {_NEEDED[0]}.{_NEEDED[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}",
            hint="use --set precision.fp8_linears=false",
        )


def use_fp8_linears(module: nn.Module, paths: Iterable[str]) -> None:
    """Replace linear layers by ones that multiply in 8 bits. Parameters and their names stay. Call it before the
    weights are sharded. Raises RequestError if a layer's sizes are no multiples of 16.
    """
    for path in paths:
        linear = module.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE:
            raise RequestError(
                f"precision.fp8_linears=true needs layers whose sizes are multiples of {_MULTIPLE}, and {path} is "
                f"{linear.in_features} x {linear.out_features}: use false, or another model"
            )
        module.set_submodule(path, Fp8TrainLinear(linear), strict=True)


class Fp8TrainLinear(nn.Linear):
    """A linear layer that multiplies in 8 bits, forward and backward. It takes over the parameters of `linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def forward(self, features: Tensor) -> Tensor:
        """Return the layer's output, (..., out_features), in autocast's dtype, or in that of `features` without it."""
        kind = features.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
        flat = features.reshape(-1, self.in_features)
        product: Tensor = _Product.apply(flat, self.weight, dtype)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            product = product + self.bias.to(dtype)
        return product.view(*features.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    """features (M, K) times weight (N, K) transposed."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        values, scale = _rounded(features, _FORWARD)
        # The weight is quantized again in backward: a saved copy would outlive the resharding of a sharded model.
        ctx.save_for_backward(values, scale, weight)
        ctx.dtype, ctx.features_dtype = dtype, features.dtype
        rounded_weight, weight_scale = _rounded(weight, _FORWARD)
        return _multiply(values, scale, rounded_weight, weight_scale, dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        values, scale, weight = ctx.saved_tensors
        slope, slope_scale = _rounded(gradient, _BACKWARD)
        rounded_weight, weight_scale = _rounded(weight, _FORWARD)
        of_features = _multiply(slope, slope_scale, rounded_weight.t(), weight_scale, ctx.dtype, fast=False)
        missing = -len(slope) % _MULTIPLE
        slope, values = (_padded(rows, missing) for rows in (slope, values))
        of_weight = _multiply(slope.t(), slope_scale, values.t(), scale, ctx.dtype, fast=False)
        return of_features.to(ctx.features_dtype), of_weight.to(weight.dtype), None


def _rounded(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `values` in 8 bits, and the factor (fp32 scalar) that dequantizes them."""
    largest = values.abs().amax().float()
    scale = torch.finfo(dtype).max / largest.clamp(min=1e-12)
    # Rounding may exceed the largest number by a little, which 8 bits would make infinite or not a number.
    limit = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-limit, limit).to(dtype), scale.reciprocal()


def _padded(rows: Tensor, missing: int) -> Tensor:
    # Zero has the same bits everywhere; `pad` knows no 8-bit floats.
    return nn.functional.pad(rows.view(torch.uint8), (0, 0, 0, missing)).view(rows.dtype) if missing else rows


def _multiply(
    first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """Return first (M, K) times second (N, K) transposed."""
    return torch._scaled_mm(
        first.contiguous(),
        second.contiguous().t(),
        scale_a=first_scale,
        scale_b=second_scale,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
