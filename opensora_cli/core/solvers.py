"""ODE solvers of sampling."""

from enum import StrEnum


class Solver(StrEnum):
    """ODE solver for rectified flow. All solve the same equation, with different errors."""

    EULER = "euler"
    """Euler's method: uses the velocity at the beginning of the step, as the reference does."""
    AB2 = "ab2"
    """Adams-Bashforth method: extrapolates the velocity half a step from this one and the previous one."""
    HEUN = "heun"
    """Heun's method: uses the mean velocity of both ends of an Euler step, with two evaluations except in the last."""

    def evaluations(self, *, is_last: bool) -> int:
        """Return the number of evaluations of each branch in a step."""
        return 2 if self is Solver.HEUN and not is_last else 1
