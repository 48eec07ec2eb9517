"""The command line is tested without torch and without weights."""

import sys
from types import ModuleType

import pytest
from cli.fake_engine import FakeEngine

import opensora_cli.engine.generate
from opensora_cli.engine.generate import early


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    module = ModuleType("opensora_cli.engine.generate.run")
    module.generate_from_request = fake.generate_from_request  # type: ignore[attr-defined]
    module.plan_from_request = fake.plan_from_request  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opensora_cli.engine.generate.run", module)
    monkeypatch.setattr(opensora_cli.engine.generate, "run", module, raising=False)
    # What is refused before an engine is imported is not the subject where there is none.
    monkeypatch.setattr(early, "refuse_early", lambda request, **_: None)
    return fake


@pytest.fixture(autouse=True)
def _no_osora_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSORA_WEIGHTS", raising=False)


@pytest.fixture
def every_stage_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages of tiny models and files printed, which take no time that would be shown."""
    monkeypatch.setattr("opensora_cli.cli.progress._took_time", lambda pace: True)
