"""Numbers of cases for tests, as many as are asked for."""

import pytest

_BATCH = 50


def batches(count: int) -> pytest.MarkDecorator:
    """Have the cases 0 to `count` tried in batches.

    Cases of one batch run in one test, so that setting up and reporting a test takes no time of them.
    """
    of_each = [range(start, min(start + _BATCH, count)) for start in range(0, count, _BATCH)]
    ids = [f"{numbers[0]}-{numbers[-1]}" for numbers in of_each]
    return pytest.mark.parametrize("numbers", of_each, ids=ids)
