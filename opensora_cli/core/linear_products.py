"""Number formats of matmuls in the linear layers of the transformer's blocks, for generation."""

from enum import StrEnum


class LinearProducts(StrEnum):
    """Number format of the factors of a matmul; sums have more bits."""

    EXACT = "exact"
    """Numbers of the run's dtype."""
    INT8 = "int8"
    """Integers of 8 bits."""
    FP8 = "fp8"
    """float8_e4m3fn."""
