"""Generations that Ctrl-C stops in the middle of denoising, and runs that continue them."""

import pytest
from tiny_world import weights_of

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate import denoise
from opensora_cli.engine.generate.request import resolve
from opensora_cli.engine.generate.run import generate
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest


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
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, steps)
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(settings)
    return str(caught.value)


def continuing(latents, reporter, *, key="resume", **overrides):
    """Return the settings that continue from saved latents, with the weights that made them."""
    given = {
        name.replace("__", "."): value if isinstance(value, Given) else Given(value, "the test")
        for name, value in overrides.items()
    }
    request = GenerateRequest(overrides={key: Given(str(latents), "--from"), **weights_of(latents), **given})
    return resolve(request, reporter=reporter)


def continued(latents, reporter=None, **options):
    reporter = reporter or SilentReporter()
    return generate(continuing(latents, reporter, **options), reporter=reporter)
