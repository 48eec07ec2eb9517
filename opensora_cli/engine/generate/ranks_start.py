"""One generation by several processes: how they come to the same settings and the same plan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.files import write_json_atomic
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.generate.plan import ExecutionPlan, make_plan, rank_hardware
from opensora_cli.engine.generate.ranks import Ranks, least
from opensora_cli.engine.generate.references import with_mode
from opensora_cli.engine.launch.launcher import LaunchRequest, launch, log_folder
from opensora_cli.engine.launch.rank import agreed, joined
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import MACHINE_KEYS, SIDECAR_SCHEMA, GenerateRequest

DeviceType = Literal["cpu", "cuda"]


def start_ranks(settings: GenerateSettings, *, flags: Sequence[str] = ()) -> None:
    """Generate in processes of their own, of which the first prints; return when all are done.

    Args:
        settings: as validated here; the ranks read them from a file.
        flags: of the command line, for the ranks too.

    Raises:
        RequestError, HardwareError, OutputError, RankFailure, KeyboardInterrupt: as `launch`.
    """
    with log_folder("generate") as log_dir:
        request = _ranks_to_start(settings, log_dir)
        saved, values = log_dir / "settings.json", settings.model_dump(mode="json")
        write_json_atomic(saved, {"schema": SIDECAR_SCHEMA, "settings": values})
        # In a file, these would give way to the environment.
        final = [f"--set={key}={_as_text(values, key)}" for key in sorted(MACHINE_KEYS)]
        launch(request, ["generate", "--from", str(saved), *final, *flags])


def require_devices(settings: GenerateSettings) -> None:
    """Check that this machine has the devices on which ranks are to be started.

    Raises:
        HardwareError: it has fewer.
    """
    _ranks_to_start(settings, Path()).check()


def _ranks_to_start(settings: GenerateSettings, log_dir: Path) -> LaunchRequest:
    parallel = settings.parallel
    # Devices by number are cards: processes are started only for who says that he wants a CPU.
    kind: DeviceType = "cpu" if settings.runtime.device == "cpu" else "cuda"
    return LaunchRequest.of(parallel, gpus=parallel.ranks_per_node, device_type=kind, log_dir=log_dir)


def request_of_rank(request: GenerateRequest, context: RankContext) -> GenerateRequest:
    """Return a request that says how many ranks there are, as those say it that torchrun or Slurm has started."""
    given = request.overrides
    if not {"parallel.gpus", "parallel.devices", "parallel.nnodes"}.isdisjoint(given):
        return request
    counted = {key: Given(value, "the number of ranks") for key, value in _counted(context).items()}
    return replace(request, overrides={**counted, **given})


@contextmanager
def planned_together(
    settings: GenerateSettings, context: RankContext, reporter: Reporter
) -> Iterator[tuple[ExecutionPlan, Ranks]]:
    """Join the other ranks, and yield the plan on which all have agreed, for this rank's device.

    Args:
        settings: rank 0's count; where they don't say how many ranks there are, `context` does.
        context: which rank this is.
        reporter: told of references that don't suit the mode.

    Raises:
        RequestError: the settings ask for another number of ranks, or contradict themselves.
        HardwareError: there is no such device, or the ranks don't find each other.
    """
    settings = settings_of_ranks(settings, context)
    with joined(context, device_type=device_type(settings)) as device:
        settings = agreed(with_mode(settings, reporter) if context.is_main else settings)
        hardware = rank_hardware(settings, device=str(device))
        # All plan for the card on which the least is free.
        hardware = replace(hardware, free_bytes=least(hardware.free_bytes))
        plan = make_plan(settings, hardware=hardware)
        yield plan, Ranks(plan.mesh, device)


def device_type(settings: GenerateSettings) -> DeviceType:
    """Return on what kind of device the ranks run."""
    chosen = settings.runtime.device
    if chosen == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if chosen == "cpu" else "cuda"


def settings_of_ranks(settings: GenerateSettings, context: RankContext) -> GenerateSettings:
    """Return settings that say how many ranks there are, also where torchrun or Slurm has started them.

    Raises:
        RequestError: they ask for another number.
    """
    parallel = settings.parallel
    if parallel.gpus is None and parallel.devices is None and parallel.nnodes == 1:
        return settings.replace(_counted(context))
    if parallel.world_size != context.world_size:
        raise RequestError(
            f"{parallel.world_size} devices are asked for, and {context.world_size} ranks were started",
            hint="drop --gpus where torchrun or srun starts the ranks",
        )
    return settings


def _counted(context: RankContext) -> dict[str, object]:
    return {"parallel.gpus": context.world_size // context.nnodes, "parallel.nnodes": context.nnodes}


def _as_text(values: Mapping[str, Any], key: str) -> str:
    section, name = key.split(".")
    value = values[section][name]
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
