"""Group norm of activations in the precision of their convolutions."""

from torch import Tensor, nn
from torch.nn import functional

from opensora_cli.models.vae.resample import without_autocast


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` that keeps the dtype under autocast; kernels sum up in fp32 whatever it is."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised activations, in their own dtype and shape."""
        # Autocast of CUDA, but not of a CPU, would hand on twice the bytes, in fp32.
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        with without_autocast(input.device):
            return functional.group_norm(input, self.num_groups, weight, bias, self.eps)
