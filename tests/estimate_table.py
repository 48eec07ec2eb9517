"""The table of estimates that ships with the presets: `cd tests && python -m estimate_table` writes it anew.

It has what is asked for where nothing fits, when all that could be given up is tried: so also what is asked for
elsewhere. Of the presets as they are it has what smaller requests would need, too.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from unittest import mock

import torch

import opensora_cli
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.estimate.remembered import known_needs
from opensora_cli.engine.generate import planning
from opensora_cli.engine.generate.planning import require_fit
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

TABLE = Path(opensora_cli.__file__).parent / "assets" / "estimates.json"

_PRESETS = ("demo", "256px", "768px", "high_compression", "flux1_dev")
_LITTLE = 2**20
_PICTURE = {"condition.references": ("any.png",)}
_GPUS = tuple({"parallel.gpus": count} for count in (2, 4, 8))
_FAST = {
    "sampling.solver": "ab2",
    "sampling.num_inference_steps": 15,
    "sampling.mean_guidance_of": 50,
    "sampling.step_cache": 0.15,
}
_GIVEN = (
    {"condition.mode": "i2v_head", **_PICTURE, **_FAST},
    *({"condition.mode": "i2v_head", **_PICTURE, **gpus} for gpus in _GPUS),
    *({"condition.mode": mode, **_PICTURE} for mode in ("i2v_head", "i2v_tail", "v2v_head", "v2v_tail")),
    {"condition.mode": "i2v_loop", "condition.references": ("any.png", "any.png")},
)
_RATIOS = ("9:16", "4:3", "3:4", "1:1")


def known_after_plans() -> dict[str, tuple[int, int]]:
    """Return what is known after the presets have been planned, without the table, on devices of both kinds."""
    known_needs().clear()
    for preset in _PRESETS:
        # A picture that is made first is one of flux1_dev, and then given.
        settings = load_preset(preset, prompt="any").replace({"picture.first": False})
        changed = (*(_GIVEN if settings.model.cond_embed else ()), *_GPUS, _FAST)
        with _little_memory("cpu", torch.float32):
            _plan(settings, with_hint=True)
            for changes in changed:
                _plan(settings.replace(changes))
        if preset == "demo":  # which has one size, and needs no GPU
            continue
        with _little_memory("cuda", torch.bfloat16):
            _plan(settings, with_hint=True)
            for changes in (*changed, *({"video.aspect_ratio": ratio} for ratio in _RATIOS)):
                _plan(settings.replace(changes))
    return {key: astuple(need) for key, need in sorted(known_needs().items())}


@contextmanager
def _little_memory(device: str, default: torch.dtype) -> Iterator[None]:
    def pick(_: str, asked: str) -> Hardware:
        dtype = default if asked == "auto" else getattr(torch, asked)
        return Hardware(torch.device(device), device, dtype, _LITTLE, _LITTLE)

    with mock.patch.object(planning, "pick_hardware", pick):
        yield


def _plan(settings: GenerateSettings, *, with_hint: bool = False) -> None:
    made = planning.make_chain(settings, tries_device=False)
    assert not made.fits
    if with_hint:
        with suppress(HardwareError):
            require_fit(made)


if __name__ == "__main__":
    lines = ",\n".join(f'"{key}": {json.dumps(need)}' for key, need in known_after_plans().items())
    TABLE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
