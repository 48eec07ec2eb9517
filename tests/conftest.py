"""Options shared by every tier of tests.

`--golden-dir` is declared here and not beside the golden tests: pytest takes options only from the conftest files that
it finds before collecting, and this one is found by a plain `pytest` as well as by `pytest tests/golden`.
"""

import copy
import functools
import gc
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from opensora_cli.settings import layers

_CACHES = pytest.StashKey[tempfile.TemporaryDirectory[str]]()
"""In place of the user's own."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CACHES] = caches = tempfile.TemporaryDirectory(prefix="osora-caches-")
    os.environ["XDG_CACHE_HOME"] = caches.name
    # The package is compiled once, and not by every worker and every program that tests start.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Before torch is imported: many processes that each take all cores wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # No deadline, which a busy machine misses, and the same examples in each run.
    hypothesis.settings.register_profile(
        "osora", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("osora")
    # A shell has what it starts in the background ignore Ctrl-C, and nohup SIGHUP, which programs under test would
    # inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object | None:
    """Give each file to one worker, which sets up its fixtures once, and all files that share ranks or a server."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return next((folder for folder in ("distributed", "server") if f"tests/{folder}/" in file), file)

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage, of which syntax trees of all tests make none: a quarter of the time of the first run.

    Nor is what is imported and collected looked through later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_CACHES].cleanup()


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test find what another has left in the user's cache; the folder is made by what writes to it.

    Nor the variable that compiled code sets for the processes it starts: with "" they are as without it.
    """
    folder = Path(request.config.stash[_CACHES].name) / hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("PYTHONSAFEPATH", "")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Weights and references of tiny models, a `World`; not to be changed."""
    from tiny_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True, scope="session")
def parsed_once() -> Iterator[None]:
    """Parse each text of YAML once: the presets are read by thousands of tests."""
    parse = functools.cache(layers.parse_yaml_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "parse_yaml_text", lambda text: copy.deepcopy(parse(text)))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_power_fails() -> Iterator[None]:
    """Do not wait for the disk. Tests of what is flushed, and when, have an `os.fsync` of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Let the engine, which collects garbage after each stage, look through what this module's tests make alone."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        metavar="DIR",
        default=None,
        help="read the golden files from DIR instead of tests/golden/data; tests whose file is not in DIR are skipped",
    )
