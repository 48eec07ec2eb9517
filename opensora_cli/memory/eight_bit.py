"""Linear layers with weights in 8 bits: dequantized at each access, or multiplied in 8 bits on a GPU. For inference.

Each row (output feature) has its own scale. That of float8_e4m3fn is a power of two, so that the product is exact in
bfloat16; the root mean square error of normally distributed weights is 2.6 %. Products also round the inputs at each
call, with a scale for each token from its largest number (Dettmers et al. 2022, LLM.int8(), without the exceptions for
outliers). Sums are in int32 or fp32, and both scales are applied to them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.exceptions import CheckpointError

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
INT8_LARGEST = 127
_PIECE = 2**24
"""Number of values that are rounded or scaled at the same time."""
_FEWEST_ROWS = 32
"""Fewest rows for `torch._int_mm`, which refuses 16."""

Rounded = tuple[Tensor, Tensor]
"""Values in 8 bits, and the scale of each row in fp32."""


class StoredLinear(nn.Linear):
    """Linear layer with a parameter `weight` in 8 bits, and `weight_scale`, (out_features, 1) in fp32.

    The attribute `weight` is their product, dequantized on each access, in the dtype of the original weight. The layer
    shares the bias of `linear`.
    """

    def __init__(self, linear: nn.Linear, values: Tensor, scale: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        # `register_parameter` refuses the name of a property.
        self._parameters["weight"] = nn.Parameter(values, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Dequantized weight, (out_features, in_features)."""
        values = self._parameters["weight"]
        assert values is not None
        # A power of two is exact in bf16, but the scale of a small weight may be too small for float16.
        product = torch.float32 if self.dtype is torch.float16 else self.dtype
        return values.to(product).mul_(self.weight_scale.to(product)).to(self.dtype)


class Fp8Linear(StoredLinear):
    """Linear layer with a parameter `weight` in float8_e4m3fn, with an error of at most 1/16 of each number.

    Raises CheckpointError if the weight has numbers that are not finite.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, *_quantized(linear.weight.detach()))


@torch.no_grad()
def store_in_fp8(block: nn.Module, *, frozen: bool = False) -> None:
    """Replace the linear layers inside a module, one after the other, by layers that store their weight in 8 bits.

    Names of parameters stay; each layer gets a `weight_scale`. Layers in 8 bits are skipped, and with `frozen`, layers
    that require gradients, too. Raises CheckpointError if a weight has numbers that are not finite.
    """
    # Iterate by name because a list of layers would keep each in memory until the last is replaced.
    for name in [name for name, _ in block.named_children()]:
        child = block.get_submodule(name)
        if not isinstance(child, nn.Linear):
            store_in_fp8(child, frozen=frozen)
        elif not isinstance(child, StoredLinear) and not (frozen and child.weight.requires_grad):
            setattr(block, name, Fp8Linear(child))


def largest_of_rows(values: Tensor) -> Tensor:
    """Return the largest magnitude in each row of `values`, (N, I); (N, 1) in fp32."""
    low, high = values.aminmax(dim=1, keepdim=True)
    return torch.maximum(-low, high).float()


def require_finite(largest: Tensor) -> None:
    """Raise CheckpointError if a magnitude of a weight is not finite."""
    if not largest.isfinite().all():
        raise CheckpointError(
            "a linear layer has weights that are not finite, which 8 bits cannot hold",
            hint="osora ckpt verify lists such tensors",
        )


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight`, (O, I), in float8_e4m3fn, and the scale of each row, (O, 1) in fp32."""
    largest = largest_of_rows(weight)
    require_finite(largest)
    mantissa, exponent = torch.frexp(largest / _LARGEST)
    # The smallest power of two that brings the largest number into range; 0.5 is a power of two itself.
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(min=-126)
    scale = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
    return (weight / scale).to(torch.float8_e4m3fn), scale


class LastInput:
    """Cache of the last input of some layers in 8 bits, while the input exists: q, k and v have the same input."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._rounded: Rounded | None = None

    def rounded(self, features: Tensor, make: Callable[[Tensor], Rounded]) -> Rounded:
        """Return `make` of the input, which must not have changed in place since the last call."""
        if self._rounded is None or self._of is None or self._of() is not features:
            self._rounded = make(features)
            self._of = weakref.ref(features, self._forget)
        return self._rounded

    def _forget(self, of: "weakref.ref[Tensor]") -> None:
        if self._of is of:
            self._of = self._rounded = None


class ProductLinear(StoredLinear):
    """Linear layer that multiplies in 8 bits. It shares the bias of `linear`, and `last` with its block."""

    def __init__(self, linear: nn.Linear, kind: LinearProducts, last: LastInput) -> None:
        weight = linear.weight.detach()
        if kind is LinearProducts.FP8:
            values, scale = _quantized(weight)
        else:
            largest = largest_of_rows(weight)
            require_finite(largest)
            scale = (largest / INT8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
            values = (weight / scale).round_().to(torch.int8)
        super().__init__(linear, values, scale)
        self.kind, self.last = kind, last

    def forward(self, features: Tensor) -> Tensor:
        """Return the layer's output in the dtype of `features`, (..., in_features) -> (..., out_features)."""
        return self.part(features, slice(None))

    def part(self, x: Tensor, features: slice) -> Tensor:
        """Return some of the output features, (..., in_features) -> (..., features)."""
        values, scale = self.last.rounded(x, lambda it: self.round_input(it.reshape(-1, self.in_features)))
        stored = self._parameters["weight"]
        assert stored is not None
        weight, weight_scale = stored[features], self.weight_scale[features]
        bias = None if self.bias is None else self.bias[features]
        if self.kind is LinearProducts.FP8:
            # The kernel applies scales and bias, and returns bfloat16.
            out = torch._scaled_mm(
                values,
                weight.t(),
                scale_a=scale,
                scale_b=weight_scale.t(),
                bias=None if bias is None else bias.to(torch.bfloat16),
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            ).to(x.dtype)
        else:
            out = torch.empty(len(values), len(weight), dtype=x.dtype, device=values.device)
            for span in _spans(out):
                scaled = _int_mm(values[span], weight) * scale[span]
                if bias is None:
                    torch.mul(scaled, weight_scale.t(), out=out[span])
                else:
                    torch.addcmul(bias, scaled, weight_scale.t(), out=out[span])
        return out.view(*x.shape[:-1], -1)

    def round_input(self, flat: Tensor) -> Rounded:
        """Return tokens (N, in_features) in 8 bits, the largest of each as the largest number, and scales (N, 1)."""
        if self.kind is LinearProducts.FP8:
            return _in_pieces(flat, torch.float8_e4m3fn, _LARGEST, lambda piece: piece)
        return _in_pieces(flat, torch.int8, INT8_LARGEST, lambda piece: piece.round_())


@torch.no_grad()
def use_products(block: nn.Module, paths: Iterable[str], kind: LinearProducts) -> None:
    """Replace linear layers of a block by layers that multiply in 8 bits; see `store_in_fp8` for names and errors."""
    last = LastInput()
    for path in paths:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        block.set_submodule(path, ProductLinear(linear, kind, last), strict=True)


def _spans(rows: Tensor) -> Iterator[slice]:
    """Return slices of rows that are computed together."""
    step = max(_FEWEST_ROWS, _PIECE // rows.shape[1])
    return (slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step))


def _in_pieces(flat: Tensor, dtype: torch.dtype, largest: float, round_: Callable[[Tensor], Tensor]) -> Rounded:
    """Return tokens in `dtype`, each scaled so that its largest magnitude is `largest`, and their scales."""
    values = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    scale = torch.empty(len(flat), 1, dtype=torch.float32, device=flat.device)
    for span in _spans(flat):
        piece = flat[span]
        scale[span] = largest_of_rows(piece).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)
        values[span] = round_(piece * scale[span].reciprocal())
    return values, scale


def _int_mm(values: Tensor, weight: Tensor) -> Tensor:
    missing = _FEWEST_ROWS - len(values)
    if missing <= 0:
        return torch._int_mm(values, weight.t())
    return torch._int_mm(nn.functional.pad(values, (0, 0, 0, missing)), weight.t())[: len(values)]
