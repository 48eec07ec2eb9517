"""Options shared by every tier of tests.

`--golden-dir` is declared here and not beside the golden tests: pytest takes options only from the conftest files that
it finds before collecting, and this one is found by a plain `pytest` as well as by `pytest tests/golden`.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="read the golden files from DIR instead of tests/golden/data; tests whose file is not in DIR are skipped",
    )
