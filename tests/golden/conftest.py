"""Fixtures of the golden tests: our numbers against numbers recorded from the reference implementation.

The tests import nothing from here; they ask for the fixtures, so that they run under every import mode of pytest.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
DEFAULT_DIR = HERE / "data"


def _load_compare() -> ModuleType:
    # Neither tests/ nor this folder need be on sys.path (pytest's importlib mode puts them nowhere).
    name = "osora_golden_compare"
    spec = importlib.util.spec_from_file_location(name, HERE / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    spec.loader.exec_module(module)
    return module


_compare = _load_compare()


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
    return lambda name: _compare.read_golden_file(golden_path(f"{name}.safetensors"))


@pytest.fixture
def golden_json(golden_path: Callable[[str], Path]) -> Callable[[str], Any]:
    """`golden_json("tables")` is the parsed content of `tables.json`."""
    return lambda name: json.loads(golden_path(f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """`assert_close(actual, expected, what="decode")`: max abs error 2e-5, relative where magnitudes exceed 1."""
    check: Callable[..., None] = _compare.assert_close
    return check
