"""T5's norm in one kernel."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional


class FusedRMSNorm(nn.Module):
    """RMS norm (Zhang & Sennrich 2019) with a scale for each feature, accumulated in fp32.

    transformers' `T5LayerNorm` computes the same in five steps, each of which writes a tensor of fp32; in half
    precision it rounds once more before the scale. Both have one parameter, `weight`.

    Args:
        weight: the scales, (D,); shared, not copied.
        eps: is added to the mean of squares.
    """

    def __init__(self, weight: nn.Parameter, *, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    @classmethod
    def from_t5_norm(cls, norm: Any) -> Self:
        """Return the norm that computes what a `T5LayerNorm` does, with the same parameter."""
        return cls(norm.weight, eps=norm.variance_epsilon).train(norm.training)

    def to_t5_norm(self) -> nn.Module:
        """Return the `T5LayerNorm` that computes the same, with the same parameter."""
        from transformers.models.t5.modeling_t5 import T5LayerNorm

        norm: nn.Module = T5LayerNorm(self.weight.shape[0], eps=self.eps)  # type: ignore[no-untyped-call]
        norm.weight = self.weight
        return norm.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, in the dtype that `T5LayerNorm` gives.

        That is the weight's in half precision, and otherwise the wider of both.
        """
        # Of one dtype torch's kernel takes them as they are, and sums in fp32 inside.
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        normed = functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), eps=self.eps)
        return normed.to(self.weight.dtype) if self.weight.dtype.itemsize == 2 else normed


def fuse_t5_norms(model: nn.Module) -> None:
    """Replace every `T5LayerNorm` inside a model by ours; names of parameters stay."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for path, module in list(model.named_modules()):
        if isinstance(module, T5LayerNorm):
            model.set_submodule(path, FusedRMSNorm.from_t5_norm(module))
