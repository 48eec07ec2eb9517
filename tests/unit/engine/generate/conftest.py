"""What the tests of a generation share."""

import pytest

from opensora_cli.engine.estimate.offload import DECODE, DENOISE, ENCODE, TEXT, StageMemory
from opensora_cli.engine.generate import plan
from opensora_cli.settings.generate import GenerateSettings


@pytest.fixture
def estimated() -> None:
    """Request it in a module that plans without estimates, for a test that needs a real one."""


@pytest.fixture
def without_estimates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan in milliseconds: what a stage needs is found on fake tensors, which takes longer than these generations."""
    if "estimated" in request.fixturenames:
        return

    def stages(settings: GenerateSettings, **sizes: object) -> tuple[StageMemory, ...]:
        names = (DECODE,) if settings.from_latents is not None else (TEXT, ENCODE, DENOISE, DECODE)
        return tuple(StageMemory(name, weight_bytes=1, data_bytes=1) for name in names)

    monkeypatch.setattr(plan, "estimate_generation", stages)
