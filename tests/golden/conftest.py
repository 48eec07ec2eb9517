"""Fixtures of the golden tests: our numbers against numbers recorded from the reference implementation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden import compare

DEFAULT_DIR = Path(__file__).resolve().parent / "data"


def _chosen_dir(config: pytest.Config) -> Path | None:
    chosen = config.getoption("--golden-dir", default=None)
    return Path(chosen) if chosen is not None else None


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    chosen = _chosen_dir(config)
    if chosen is not None and not chosen.is_dir():
        # A mistyped folder must not look like a folder in which every test is skipped.
        raise pytest.UsageError(f"--golden-dir {chosen} is not a folder")


@pytest.fixture
def golden_path(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """`golden_path("tables.json") -> Path` of an existing file; skips (chosen folder) or fails (default) without it."""
    chosen = _chosen_dir(request.config)

    def find(file_name: str) -> Path:
        path = (chosen or DEFAULT_DIR) / file_name
        if not path.is_file():
            if chosen is not None:
                pytest.skip(f"{chosen} has no {file_name}")
            pytest.fail(f"{path} is missing", pytrace=False)
        return path

    return find


@pytest.fixture
def golden(golden_path: Callable[[str], Path]) -> Callable[[str], Any]:
    """`golden("mmdit_video") -> GoldenFile(config, params, inputs, outputs)` with the tensors' prefixes taken off."""
    return lambda name: compare.read_golden_file(golden_path(f"{name}.safetensors"))


@pytest.fixture
def golden_json(golden_path: Callable[[str], Path]) -> Callable[[str], Any]:
    """`golden_json("tables")` is the parsed content of `tables.json`."""
    return lambda name: json.loads(golden_path(f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """`assert_close(actual, expected, what="decode")`: max abs error 2e-5, relative where magnitudes exceed 1."""
    check: Callable[..., None] = compare.assert_close
    return check
