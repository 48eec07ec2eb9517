"""How the linear layers of the transformer's blocks are multiplied when a video is generated."""

from enum import StrEnum


class LinearProducts(StrEnum):
    """What is multiplied; sums are in more bits."""

    EXACT = "exact"
    """Numbers of the run's dtype."""
    INT8 = "int8"
    """Integers of 8 bits."""
    FP8 = "fp8"
    """float8_e4m3fn."""
