"""Linear layers that multiply in 8 bits, for inference: their weight is stored so, and inputs are rounded at each call.

Weights have a scale for each row (output feature), set once; inputs one for each token, from its largest number
(Dettmers et al. 2022, LLM.int8(), without its exceptions). Sums are in int32 or fp32, and both scales are applied to
them. Of int8, weights and inputs are symmetric about zero.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.memory.fp8_storage import Fp8Linear, StoredLinear, largest_of_rows, require_finite

INT8_LARGEST = 127
_WITHOUT_SATURATION = 64
"""Of a weight on a CPU whose sums of two products saturate at 16 bits: twice 255 times this does not."""
_ZERO = 128
"""Which stands for 0 in the unsigned inputs of a CPU."""
_PIECE = 2**18
"""Numbers that a CPU rounds, or scales, at a time: as many as its cache holds."""
_PIECE_ON_GPU = 2**24
_FEWEST_ROWS = 32
"""That `torch._int_mm` is given on a GPU: it refuses 16."""
_SAMPLED_TOKENS, _SAMPLED_ROWS = 16, 256

Rounded = tuple[Tensor, Tensor]
"""Numbers in 8 bits, and the scale of each row, in fp32."""


class LastInput:
    """The latest input of some layers in 8 bits, as long as that input exists: q, k and v have the same one."""

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._rounded: Rounded | None = None

    def rounded(self, features: Tensor, make: Callable[[Tensor], Rounded]) -> Rounded:
        """Return `make` of the input. It must not have been changed in place since the last call."""
        if self._rounded is None or self._of is None or self._of() is not features:
            self._rounded = make(features)
            self._of = weakref.ref(features, self._forget)
        return self._rounded

    def _forget(self, of: "weakref.ref[Tensor]") -> None:
        if self._of is of:
            self._of = self._rounded = None


class ProductLinear(StoredLinear, ABC):
    """A linear layer that multiplies in 8 bits. It takes over the bias of `linear`, and `last` is that of its block."""

    last: LastInput

    def forward(self, features: Tensor) -> Tensor:
        """Return the layer's output in the dtype of `features`, (..., in_features) -> (..., out_features)."""
        return self.part(features, slice(None))

    def part(self, x: Tensor, features: slice) -> Tensor:
        """Return some of the output features, (..., in_features) -> (..., features)."""
        rounded = self.last.rounded(x, lambda it: self.round_input(it.reshape(-1, self.in_features)))
        return self.multiply(rounded, features, x.dtype).view(*x.shape[:-1], -1)

    @abstractmethod
    def round_input(self, flat: Tensor) -> Rounded:
        """Return tokens (N, in_features) in 8 bits, and their scales, (N, 1) in fp32."""

    @abstractmethod
    def multiply(self, rounded: Rounded, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return the output features `rows` of tokens in 8 bits, (N, features)."""

    def _stored(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        values = self._parameters["weight"]
        assert values is not None
        return values[rows], self.weight_scale[rows], None if self.bias is None else self.bias[rows]


class Int8Linear(ProductLinear):
    """The parameter `weight` is int8, of at most `largest`, beside `weight_scale`, (out_features, 1) in fp32."""

    def __init__(self, linear: nn.Linear, last: LastInput, *, largest: int = INT8_LARGEST) -> None:
        weight = linear.weight.detach()
        most = largest_of_rows(weight)
        require_finite(most)
        scale = (most / largest).clamp(min=torch.finfo(torch.float32).tiny)
        super().__init__(linear, (weight / scale).round_().to(torch.int8), scale)
        self.last = last

    def round_input(self, flat: Tensor) -> Rounded:
        """On a CPU 128 is added, whose products are of unsigned by signed numbers."""
        if not _is_on_cpu(flat):
            return _in_pieces(flat, torch.int8, INT8_LARGEST, lambda piece: piece.round_())
        # What is over zero is cut off to what it is rounded to.
        return _in_pieces(flat, torch.uint8, INT8_LARGEST, lambda piece: piece.add_(_ZERO + 0.5))

    def multiply(self, rounded: Rounded, rows: slice, dtype: torch.dtype) -> Tensor:
        """Sums are exact, in int32."""
        values, scale = rounded
        weight, weight_scale, bias = self._stored(rows)
        if _is_on_cpu(values):
            sums = _multiply_on_cpu(values, weight, weight_scale)
            for span in _spans(sums):
                sums[span].mul_(scale[span])
                if bias is not None:
                    sums[span].add_(bias)
            return sums.to(dtype)
        out = torch.empty(len(values), len(weight), dtype=dtype, device=values.device)
        for span in _spans(out):
            scaled = _int_mm(values[span], weight) * scale[span]
            if bias is None:
                torch.mul(scaled, weight_scale.t(), out=out[span])
            else:
                torch.addcmul(bias, scaled, weight_scale.t(), out=out[span])
        return out


class Fp8ProductLinear(ProductLinear, Fp8Linear):
    """As `Fp8Linear` stores it, multiplied without being dequantized, by the GPU's kernel with a scale for each row."""

    def __init__(self, linear: nn.Linear, last: LastInput) -> None:
        Fp8Linear.__init__(self, linear)
        self.last = last

    def round_input(self, flat: Tensor) -> Rounded:
        """The largest number of a token becomes that of the format."""
        return _in_pieces(flat, torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max, lambda piece: piece)

    def multiply(self, rounded: Rounded, rows: slice, dtype: torch.dtype) -> Tensor:
        """Scales and bias are applied by the kernel, whose result is bfloat16."""
        values, scale = rounded
        weight, weight_scale, bias = self._stored(rows)
        return torch._scaled_mm(
            values,
            weight.t(),
            scale_a=scale,
            scale_b=weight_scale.t(),
            bias=None if bias is None else bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        ).to(dtype)


@dataclass(frozen=True, slots=True)
class ProductError:
    """What 8 bits change of a layer's products, sampled."""

    path: str
    relative_error: float
    """The norm of the difference over that of the result."""


@torch.no_grad()
def use_products(
    block: nn.Module, paths: Iterable[str], kind: LinearProducts, *, largest: int = INT8_LARGEST
) -> list[ProductError]:
    """Replace linear layers of a block by ones that multiply in 8 bits, and return what that changes of each.

    Beside the result, one weight in fp32 is held at a time. Names of parameters stay; each layer gets a `weight_scale`.
    Errors are those of normally distributed inputs, the same ones at each call. `largest` is that of int8 weights.

    Raises:
        CheckpointError: a weight has numbers that are not finite; the layers before it have been replaced.
    """
    last, errors = LastInput(), []
    for path in paths:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        is_fp8 = kind is LinearProducts.FP8
        layer = Fp8ProductLinear(linear, last) if is_fp8 else Int8Linear(linear, last, largest=largest)
        # Of fake weights there is nothing to be known.
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
    """Return what a layer of `use_products` makes of tokens (N, in_features), and what it should make of them, in fp32.

    The latter is the product of the same numbers in 8 bits, with other kernels.
    """
    assert isinstance(layer, ProductLinear)
    expected = _rounded_product(layer, tokens, slice(None))
    return layer(tokens).float(), expected if layer.bias is None else expected + layer.bias.float()


def _rounded_product(layer: ProductLinear, tokens: Tensor, rows: slice) -> Tensor:
    values, scale = layer.round_input(tokens)
    zero = _ZERO if values.dtype is torch.uint8 else 0
    stored, weight_scale, _ = layer._stored(rows)
    return ((values.float() - zero) * scale) @ (stored.float() * weight_scale).t()


@cache
def int8_largest_on_cpu() -> int:
    """Return the largest int8 weight whose products this CPU sums up without saturation."""
    largest = torch.full((32, 64), 255, dtype=torch.uint8)
    weight = torch.full((32, 64), INT8_LARGEST, dtype=torch.int8)
    sums = _multiply_on_cpu(largest, weight, torch.ones(32, 1))
    is_exact = torch.equal(sums, torch.full_like(sums, 64 * (255 - _ZERO) * INT8_LARGEST))
    return INT8_LARGEST if is_exact else _WITHOUT_SATURATION


def _spans(rows: Tensor) -> Iterator[slice]:
    """Yield slices of rows that are computed with at a time."""
    most = _PIECE if _is_on_cpu(rows) else _PIECE_ON_GPU
    step = max(_FEWEST_ROWS, most // rows.shape[1])
    return (slice(start, min(start + step, len(rows))) for start in range(0, len(rows), step))


def _is_on_cpu(values: Tensor) -> bool:
    return values.device.type == "cpu"


def _in_pieces(flat: Tensor, dtype: torch.dtype, largest: float, shift: Callable[[Tensor], Tensor]) -> Rounded:
    """Return tokens, scaled to a magnitude of `largest` each and shifted, in `dtype`, and their scales."""
    values = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    scale = torch.empty(len(flat), 1, dtype=torch.float32, device=flat.device)
    for span in _spans(flat):
        piece = flat[span]
        scale[span] = largest_of_rows(piece).div_(largest).clamp_(min=torch.finfo(torch.float32).tiny)
        values[span] = shift(piece * scale[span].reciprocal())
    return values, scale


def _multiply_on_cpu(values: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return products of uint8 (M, K), of which 128 is zero, and int8 (N, K), times the scale of each row, in fp32."""
    # Its layout takes oneDNN a thousandth of the time of the product, and as much memory as the weight.
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    sums: Tensor = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, _ZERO, packed, weight_scale.flatten(), zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


def _int_mm(values: Tensor, weight: Tensor) -> Tensor:
    missing = _FEWEST_ROWS - len(values)
    if missing <= 0:
        return torch._int_mm(values, weight.t())
    return torch._int_mm(nn.functional.pad(values, (0, 0, 0, missing)), weight.t())[: len(values)]
