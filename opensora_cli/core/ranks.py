"""Rank of this process, from the environment of torchrun, Slurm or osora's launcher."""

import re
from collections.abc import Mapping, Sequence
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
    _require(environment, needed, "torchrun", "start with torchrun or --gpus; to run alone: unset")
    rank, local_rank, world_size, nnodes = _counts(environment, *_TORCHRUN[:3], "GROUP_WORLD_SIZE")
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
    needed = ("SLURM_PROCID", "SLURM_LOCALID", tasks_name, nodes_name, hosts_name, "SLURM_JOB_ID")
    _require(environment, needed, "srun", "start with srun; to run alone: unset")
    rank, local_rank, world_size, nnodes = _counts(environment, *needed[:4])
    if world_size == 1:
        return None
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


def _require(environment: Mapping[str, str], names: Sequence[str], starter: str, hint: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        there, verb = next(name for name in names if name in environment), "is" if len(missing) == 1 else "are"
        raise RequestError(
            f"{there} is set, but {' and '.join(missing)} {verb} not: {starter} sets all of them",
            hint=f"{hint} {there}",
        )


def _counts(environment: Mapping[str, str], rank: str, local: str, size: str, nodes: str) -> tuple[int, int, int, int]:
    """Return the rank, the local rank, the number of ranks and that of machines. Raises RequestError if they differ."""
    world_size, nnodes = _number(environment, size), _number(environment, nodes) if nodes in environment else 1
    for name in (rank, local):
        if _number(environment, name) >= world_size:
            raise RequestError(f"{name}={environment[name]} contradicts {size}={world_size}: ranks are 0 to {size} - 1")
    if nnodes == 0 or world_size % nnodes:
        raise _uneven(f"{world_size} on {nnodes}")
    return _number(environment, rank), _number(environment, local), world_size, nnodes


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise RequestError(f"{name}={text!r} must be a whole number from 0 on")
    return int(text)


def _uneven(how: str) -> RequestError:
    return RequestError(f"machines have different numbers of ranks: {how}", hint="start equally many on every machine")


def _port(environment: Mapping[str, str]) -> int:
    number = _number(environment, "MASTER_PORT")
    if not 0 < number < 2**16:
        raise RequestError(f"MASTER_PORT={number} must be 1 to 65535")
    return number
