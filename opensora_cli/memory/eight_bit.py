"""Linear layers with weights in 8 bits: dequantized at each access, or multiplied in 8 bits on a GPU. For inference.

Each row (output feature) has its own scale. That of float8_e4m3fn is a power of two, so that the product is exact in
bfloat16; the root mean square error of normally distributed weights is 2.6 %. Products also round the inputs at each
call, with a scale for each token from its largest number (Dettmers et al. 2022, LLM.int8(), without the exceptions for
outliers). Sums are in int32 or fp32, and both scales are applied to them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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
_SAMPLED_TOKENS, _SAMPLED_ROWS = 16, 256

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
        weight, weight_scale, bias = self.rows(features)
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

    def rows(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows of the weight in 8 bits, of its scale and of the bias."""
        values = self._parameters["weight"]
        assert values is not None
        return values[rows], self.weight_scale[rows], None if self.bias is None else self.bias[rows]


@dataclass(frozen=True, slots=True)
class ProductError:
    """Error of the products of a layer in 8 bits, from a sample."""

    path: str
    relative_error: float
    """Norm of the difference divided by the norm of the result."""


@torch.no_grad()
def use_products(block: nn.Module, paths: Iterable[str], kind: LinearProducts) -> list[ProductError]:
    """Replace linear layers of a block by layers that multiply in 8 bits, and return the error of each.

    The error is for normally distributed inputs, the same at each call. See `store_in_fp8` for names and errors.
    """
    last, errors = LastInput(), []
    for path in paths:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        layer = ProductLinear(linear, kind, last)
        # Fake weights have no error.
        if not linear.weight.is_meta:
            errors.append(ProductError(path, _sampled_error(linear.weight.detach(), layer)))
        block.set_submodule(path, layer, strict=True)
    return errors


def _sampled_error(weight: Tensor, layer: ProductLinear) -> float:
    generator = torch.Generator(weight.device).manual_seed(8)
    tokens = torch.randn(_SAMPLED_TOKENS, weight.shape[1], generator=generator, device=weight.device)
    rows = slice(None, None, max(1, len(weight) // _SAMPLED_ROWS))
    exact = tokens @ weight[rows].float().t()
    found = _rounded_product(layer, tokens, rows)
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))


def output_and_rounded_product(layer: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a layer of `use_products` for tokens, and the fp32 product of the same rounded numbers."""
    assert isinstance(layer, ProductLinear)
    expected = _rounded_product(layer, tokens, slice(None))
    return layer(tokens).float(), expected if layer.bias is None else expected + layer.bias.float()


def _rounded_product(layer: ProductLinear, tokens: Tensor, rows: slice) -> Tensor:
    values, scale = layer.round_input(tokens)
    stored, weight_scale, _ = layer.rows(rows)
    return (values.float() * scale) @ (stored.float() * weight_scale).t()


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
