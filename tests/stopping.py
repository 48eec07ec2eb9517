"""Generations that Ctrl-C stops in the middle of denoising."""

import pytest

from opensora_cli.engine.generate import denoise
from opensora_cli.engine.generate.run import generate


def stop_after(monkeypatch, steps):
    """Let Ctrl-C come in the middle of the step after so many, once."""
    velocity, left = denoise.GuidedVelocity, [steps]

    class Stopping(velocity):
        def __call__(self, *args, **options):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return super().__call__(*args, **options)

    monkeypatch.setattr(denoise, "GuidedVelocity", Stopping)


def stopped(settings, steps):
    """Return the words of a run that is stopped after so many steps."""
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, steps)
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(settings)
    return str(caught.value)
