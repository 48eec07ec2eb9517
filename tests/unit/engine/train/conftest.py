"""Trainings that say the same on every CPU."""

import pytest

from opensora_cli.engine.train import run


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch):
    """Take the CPU for one that multiplies in bfloat16: others are warned of it."""
    monkeypatch.setattr(run, "multiplies_bf16", lambda device: True)
