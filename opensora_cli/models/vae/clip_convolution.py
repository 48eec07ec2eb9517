"""Convolutions of clips, in time too."""

from torch import Tensor, nn
from torch.nn import functional


class ClipConv3d(nn.Conv3d):
    """`nn.Conv3d` with sound gradients in bf16 on a CPU, too."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a clip (B,C,T,H,W)."""
        if input.device.type == "cpu" and 1 < input.shape[2] < self.kernel_size[0]:
            # There oneDNN takes a part of a bf16 kernel's gradient from memory that nobody wrote, unless time is padded
            # by hand.
            side = int(self.padding[0])
            padded = functional.pad(input, (0, 0, 0, 0, side, side))
            padding = (0, *self.padding[1:])
            return functional.conv3d(padded, self.weight, self.bias, self.stride, padding, groups=self.groups)
        return super().forward(input)
