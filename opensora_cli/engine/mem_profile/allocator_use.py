"""Torch's allocator on CUDA: its reserved memory, and the effect of its settings, each tried in a separate process.

Run as a program, this module is such a process: it reads generation settings and prints figures, both as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from opensora_cli.core.device import free_and_total_bytes, is_gpu, limited_memory, peak_reserved_bytes
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.engine.estimate.offload import DENOISE
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.planning import make_plan
from opensora_cli.engine.mem_profile.measured_stages import Measured, time_stage
from opensora_cli.engine.mem_profile.report import Allocator, Technique, compared
from opensora_cli.settings.generate import GenerateSettings

CHOICES = ("expandable_segments:True", "garbage_collection_threshold:0.8", "max_split_size_mb:128")
_VARIABLE, _FORMER_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_SECONDS = 1800
_SHOWN = 120
"""Most characters of the message of a failed process."""
_WASTEFUL = 0.2
"""Share of unused reserved memory at the peak above which the report advises a setting."""


def allocator_use(measured: Sequence[Measured]) -> Allocator | None:
    """Return the allocator use of the stage with the most reserved memory; None if the allocator was not used."""
    most = max(measured, key=lambda result: result.reserved_bytes, default=None)
    if most is None or not most.reserved_bytes:
        return None
    unused = 1 - most.allocated_bytes / most.reserved_bytes
    advice = "fragmentation is low: nothing to fix"
    if unused > _WASTEFUL:
        advice = f"{unused:.0%} is reserved and unused: try {_VARIABLE}={CHOICES[0]}"
    return Allocator(allocated_bytes=most.allocated_bytes, reserved_bytes=most.reserved_bytes, advice=advice)


def allocator_techniques(plan: Plan) -> list[Technique]:
    """Return the effect of each setting on the reserved memory and the time of denoising."""
    if not is_gpu(plan.hardware.device):
        reason = "not measured: torch's allocator has no settings on a CPU"
        return [Technique(name=f"allocator: {choice}", reason=reason) for choice in CHOICES]
    base = _in_a_process(plan.settings, None)
    found = []
    for choice in CHOICES:
        name = f"allocator: {choice}"
        tried = base if isinstance(base, str) else _in_a_process(plan.settings, choice)
        if isinstance(base, str) or isinstance(tried, str):
            found.append(Technique(name=name, reason=f"not measured: {tried}"))
        else:
            found.append(compared(name, before=base, after=tried, of="memory reserved while denoising"))
    return found


def _in_a_process(settings: GenerateSettings, choice: str | None) -> tuple[int, float] | str:
    """Return reserved bytes and seconds with a choice of settings, None for no choice, or the reason for a failure."""
    environment = {name: value for name, value in os.environ.items() if name not in (_VARIABLE, _FORMER_VARIABLE)}
    if choice is not None:
        environment[_VARIABLE] = choice
    try:
        done = subprocess.run(
            module_command(__name__),
            input=settings.model_dump_json(),
            env=safe_environment(environment),
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
        figures = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return f"its process failed: {said[-1][:_SHOWN]}"
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"its process failed: {str(error)[:_SHOWN]}"
    return int(figures["reserved_bytes"]), float(figures["seconds"])


def _main() -> None:
    plan = make_plan(GenerateSettings.model_validate_json(sys.stdin.read()))
    device = plan.hardware.device
    # The allocator ignores `garbage_collection_threshold` without a limit, so the limit is the whole GPU.
    with limited_memory(device, free_and_total_bytes(device)[1]):
        seconds = time_stage(plan, DENOISE)
    print(json.dumps({"reserved_bytes": peak_reserved_bytes(device), "seconds": seconds}))


if __name__ == "__main__":
    _main()
