"""Rotary position embedding over several axes (Su et al. 2021), half-split pairs."""

import torch
from torch import Tensor


def rotary_angles(position_ids_BNA: Tensor, *, axes_dim: tuple[int, ...], theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every rotation angle, both (B, 1, N, D/2) in fp32.

    Axis i has axes_dim[i]/2 frequencies theta^(-2k/axes_dim[i]); the axes are concatenated.

    Args:
        position_ids_BNA: position along each of the A axes; a batch of 1 serves all samples.
        axes_dim: share of a head's width given to each axis, A even numbers.
        theta: base of the frequencies.
    """
    angles = []
    for axis, dim in enumerate(axes_dim):
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids_BNA.device) / dim
        # A product by broadcasting, not a matmul: autocast would round the angles of a matmul to bf16.
        angles.append(position_ids_BNA[..., axis, None].float() * theta**-exponents)
    angles_B1NE = torch.cat(angles, dim=-1)[:, None]
    return angles_B1NE.cos(), angles_B1NE.sin()


def rotate(x_BHND: Tensor, cos_B1NE: Tensor, sin_B1NE: Tensor) -> Tensor:
    """Rotate the pairs (j, D/2 + j) of every head by the given angles, in fp32.

    Args:
        x_BHND: queries or keys, fp32.
        cos_B1NE: cosine of the angles, E = D/2.
        sin_B1NE: sine of the angles.
    """
    first, second = x_BHND.chunk(2, dim=-1)
    return torch.cat((first * cos_B1NE - second * sin_B1NE, second * cos_B1NE + first * sin_B1NE), dim=-1)
