"""Numbers of cases for tests: a few in the fast tier, as many as are asked for in the slow one."""

import pytest

_BATCH = 50


def batches(count: int, *, first: int) -> pytest.MarkDecorator:
    """Have the cases 0 to `count` tried in batches, the `first` ones in the fast tier.

    Cases of one batch run in one test, so that setting up and reporting a test takes no time of them.
    """
    starts = range(first, count, _BATCH)
    later = [range(start, min(start + _BATCH, count)) for start in starts]
    slow = [pytest.param(numbers, marks=pytest.mark.slow, id=f"{numbers[0]}-{numbers[-1]}") for numbers in later]
    return pytest.mark.parametrize("numbers", [pytest.param(range(first), id=f"0-{first - 1}"), *slow])
