"""Numbers of cases for tests, as many as are asked for."""

import os

import pytest

_TIMES = int(os.environ.get("HOSTILE_TIMES", "1"))


def batches(count: int, *, size: int = 50) -> pytest.MarkDecorator:
    """Try the cases from 0 to `count`, or HOSTILE_TIMES as many, in batches.

    Cases of one batch run in one test, so that setting up and reporting a test takes no time of them.
    """
    count *= _TIMES
    of_each = [range(start, min(start + size, count)) for start in range(0, count, size)]
    ids = [f"{numbers[0]}-{numbers[-1]}" for numbers in of_each]
    return pytest.mark.parametrize("numbers", of_each, ids=ids)
