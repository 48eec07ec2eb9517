"""How far two tensors are apart, relative to the largest magnitude: rounding depends on the CPU and its libraries."""

import math

from torch import Tensor


def relative_error(found: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return the largest absolute error over the largest magnitude expected (`floor` at least), infinite for NaN."""
    assert found.shape == expected.shape, f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    error, scale = (found - expected).abs().max().item(), max(expected.abs().max().item(), floor)
    if math.isnan(error):
        return math.inf
    return error / scale if error else 0.0


def assert_close(
    found: Tensor, expected: Tensor, *, tolerance: float = 1e-5, floor: float = 0.0, what: object = "result"
) -> None:
    """Fail unless the tensors agree to `tolerance`, relative to the largest magnitude expected."""
    error = relative_error(found, expected, floor=floor)
    assert error <= tolerance, f"{what}: relative error {error:.3g}, allowed {tolerance:.3g}"
