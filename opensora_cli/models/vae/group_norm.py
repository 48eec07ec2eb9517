"""Group norm of activations in the precision of their convolutions."""

from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.vae.resample import without_autocast


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that keeps the dtype under autocast; kernels sum in fp32 for any dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized activations in their own dtype and shape."""
        # On a GPU, but not on a CPU, autocast would return twice the bytes, in fp32.
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        with without_autocast(input.device):
            return functional.group_norm(input, self.num_groups, weight, bias, self.eps)
