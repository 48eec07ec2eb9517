"""How sampling gets from one time to the next."""

from enum import StrEnum


class Solver(StrEnum):
    """A method for the differential equation of rectified flow; all follow the same path, with errors of their own."""

    EULER = "euler"
    """Straight on with the velocity at the beginning of the step; what the reference does."""
    AB2 = "ab2"
    """Adams-Bashforth: with the velocity half a step on, by the line through this one and the one before."""
    HEUN = "heun"
    """With the mean of the velocities at both ends of an Euler step: two evaluations a step but for the last."""

    def evaluations(self, *, is_last: bool) -> int:
        """Return how often a step evaluates each branch."""
        return 2 if self is Solver.HEUN and not is_last else 1
