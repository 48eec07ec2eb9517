"""Rank of this process, from the environment of torchrun, Slurm or osora's launcher."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import RequestError

LOG_VARIABLE = "OSORA_RANK_LOG"
"""Variable that osora's launcher sets to the log file of a rank."""

STORE_VARIABLE = "OSORA_RANK_STORE"
"""Variable that osora's launcher sets to the file store of its ranks."""

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")

# Below the ephemeral ports of Linux, which begin at 32768.
_FIRST_PORT, _PORTS = 12_000, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Rank of a process, and the address of the store of its group."""

    rank: int
    """Rank from 0 to world_size - 1."""
    local_rank: int
    """Rank among the processes on this machine, which selects the GPU."""
    world_size: int
    nnodes: int
    """Number of machines."""
    master_addr: str = ""
    """Host of the store through which the ranks find each other; empty if they have a `store` file."""
    master_port: int = 0
    store: Path | None = None
    """File store instead of a host. None means that osora's launcher did not start this rank."""
    log: Path | None = None
    """Log file of this rank. None means that osora's launcher did not start it."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes results."""
        return self.rank == 0


def find_context(environment: Mapping[str, str]) -> RankContext | None:
    """Return the rank of this process, or None if it runs alone.

    Variables of torchrun, which osora's launcher sets, too, have priority over those of Slurm: ranks that torchrun
    started in a Slurm job have both. Only processes that `srun` started are ranks of Slurm; the script of a batch job
    has most of the variables, but is no rank.

    Raises:
        RequestError: Variables are missing, no numbers, or contradict each other. The message names them.
    """
    is_slurm_step = "SLURM_PROCID" in environment and {"SLURM_STEP_ID", "SLURM_STEPID"} & environment.keys()
    # Scripts for srun often export WORLD_SIZE and the master's address, but can't know a rank.
    if {"RANK", "LOCAL_RANK"} & environment.keys() or ("WORLD_SIZE" in environment and not is_slurm_step):
        return _of_torchrun(environment)
    return _of_slurm(environment) if is_slurm_step else None


def is_of_launcher(path: Path, environment: Mapping[str, str]) -> bool:
    """Return whether osora's launcher wrote a file for this rank, that is, beside the log of the rank."""
    log = environment.get(LOG_VARIABLE)
    return log is not None and Path(log).absolute().parent == path.absolute().parent


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm host list: `node01` for `node[01-04,7],login`.
    Raises RequestError if the text is not such a list.
    """
    match = re.fullmatch(r"((?:[^,\[\]\s]|\[[\d,-]+\])+)(?:,.*)?", nodelist)
    first = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", match[1]) if match else ""
    if not first or "[" in first:
        raise RequestError(f"SLURM_NODELIST={nodelist!r} is no list of hosts such as node[01-04,7]")
    return first


def _of_torchrun(environment: Mapping[str, str]) -> RankContext:
    store, log = (Path(text) if (text := environment.get(name)) else None for name in (STORE_VARIABLE, LOG_VARIABLE))
    needed = [name for name in _TORCHRUN if store is None or name not in _MEETING]
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        there = [name for name in _TORCHRUN[:3] if name in environment]
        raise RequestError(
            f"{' and '.join(there)} {_is(there)} set, but {' and '.join(missing)} {_is(missing)} not: torchrun sets "
            f"all of {', '.join(_TORCHRUN)}",
            hint=f"start with torchrun or --gpus; to run alone: unset {' '.join(there)}",
        )
    rank, local_rank, world_size = (_number(environment, name) for name in _TORCHRUN[:3])
    nnodes = _number(environment, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environment else 1
    _check_ranks({"RANK": rank, "LOCAL_RANK": local_rank}, "WORLD_SIZE", world_size)
    _check_even(world_size, nnodes)
    if "LOCAL_WORLD_SIZE" in environment and _number(environment, "LOCAL_WORLD_SIZE") * nnodes != world_size:
        raise _uneven(f"{world_size} on {nnodes}, and {environment['LOCAL_WORLD_SIZE']} on this one")
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        nnodes=nnodes,
        master_addr="" if store else environment["MASTER_ADDR"],
        master_port=0 if store else _port(environment),
        store=store,
        log=log,
    )


def _of_slurm(environment: Mapping[str, str]) -> RankContext | None:
    # A step may be smaller than its job.
    tasks_name = _first_set(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nodes_name = _first_set(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    hosts_name = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    needed = ("SLURM_LOCALID", tasks_name, nodes_name, hosts_name, "SLURM_JOB_ID")
    missing = [name for name in needed if name not in environment]
    if missing:
        raise RequestError(
            f"SLURM_PROCID is set, but {' and '.join(missing)} {_is(missing)} not: srun sets all of them",
            hint="start with srun; to run alone: unset SLURM_PROCID",
        )
    rank, local_rank, world_size, nnodes = (
        _number(environment, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", tasks_name, nodes_name)
    )
    _check_ranks({"SLURM_PROCID": rank, "SLURM_LOCALID": local_rank}, tasks_name, world_size)
    if "WORLD_SIZE" in environment and _number(environment, "WORLD_SIZE") != world_size:
        raise RequestError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} contradicts {tasks_name}={world_size}", hint="unset WORLD_SIZE"
        )
    if world_size == 1:
        return None
    _check_even(world_size, nnodes)
    # For example, 4(x2),3 means twice 4 and once 3.
    shares = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if len({share.partition("(")[0] for share in shares.split(",")}) > 1:
        raise _uneven(f"SLURM_STEP_TASKS_PER_NODE={shares}")
    port = _FIRST_PORT + _number(environment, "SLURM_JOB_ID") % _PORTS
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        nnodes=nnodes,
        master_addr=environment.get("MASTER_ADDR") or first_host(environment[hosts_name]),
        master_port=_port(environment) if environment.get("MASTER_PORT") else port,
    )


def _first_set(environment: Mapping[str, str], *names: str) -> str:
    """Return the first name that is set, or the best-known name for a message."""
    return next((name for name in names if name in environment), names[1])


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise RequestError(f"{name}={text!r} must be a whole number from 0 on")
    return int(text)


def _check_ranks(ranks: Mapping[str, int], size_name: str, world_size: int) -> None:
    for name, rank in ranks.items():
        if rank >= world_size:
            raise RequestError(f"{name}={rank} contradicts {size_name}={world_size}: ranks are 0 to {size_name} - 1")


def _check_even(world_size: int, nnodes: int) -> None:
    if nnodes == 0 or world_size % nnodes:
        raise _uneven(f"{world_size} on {nnodes}")


def _uneven(how: str) -> RequestError:
    return RequestError(f"machines have different numbers of ranks: {how}", hint="start equally many on every machine")


def _port(environment: Mapping[str, str]) -> int:
    number = _number(environment, "MASTER_PORT")
    if not 0 < number < 2**16:
        raise RequestError(f"MASTER_PORT={number} must be 1 to 65535")
    return number
