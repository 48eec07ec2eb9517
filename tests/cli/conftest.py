"""The command line is tested without torch and without weights."""

import sys
from types import ModuleType
from typing import Any

import pytest
from cli.fake_engine import FakeEngine

import opensora_cli.engine.generate
from opensora_cli.cli.app import main
from opensora_cli.engine.generate import request as generate_request


@pytest.fixture
def osora(capsys):
    """Run a command line, which must end with an exit code, and return what it prints: `out` and `err`."""

    def run(*words: str, code: int = 0) -> Any:
        assert main([*words]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def run(capsys):
    """Run a command line, and return its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        code = main([*map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def engine(monkeypatch):
    fake = FakeEngine()
    for package, name, attribute, replacement in (
        (opensora_cli.engine.generate, "run", "generate", fake.generate),
        (opensora_cli.engine.generate, "dry_run", "plan_generation", fake.plan_generation),
    ):
        module = ModuleType(f"{package.__name__}.{name}")
        setattr(module, attribute, replacement)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(package, name, module, raising=False)
    monkeypatch.setattr(generate_request, "resolve", fake.resolve)
    # Files and weights are not the subject.
    monkeypatch.setattr(generate_request, "refuse_early", lambda settings, **_: None)
    return fake


@pytest.fixture(autouse=True)
def _no_osora_environment(monkeypatch):
    monkeypatch.delenv("OSORA_WEIGHTS", raising=False)


@pytest.fixture
def every_stage_takes_time(monkeypatch):
    """Have stages of tiny models and files printed, which take no time that would be shown."""
    monkeypatch.setattr("opensora_cli.core.progress.NO_TIME", "")
