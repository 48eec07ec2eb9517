"""Number of CPU threads, limited by the work and by the quota of a container, which torch ignores."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import first_few
from opensora_cli.core.limits import Cores, read_cores
from opensora_cli.core.progress import Reporter

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user chooses the number of threads; torch reads them."""
RANK_VARIABLE = "OSORA_RANK_THREADS"
"""Variable that the launcher sets to the OMP_NUM_THREADS of a rank, unless a user chose it."""
_VALUES_PER_THREAD = 2**15
"""Least number of values in a piece of an element-wise operation (`at::internal::GRAIN_SIZE` of torch)."""

_computed_in: int | None = None
"""ID of the process that has computed with several threads; a forked process inherits it."""

_ROUNDED_UP = 0.25
"""Largest missing part of a core that is rounded up. Half of a core is not worth a thread that all others wait for."""


class ThreadChoice(Document):
    """Number of threads, with the reason."""

    count: int
    reason: str
    is_free: bool = Field(default=False, exclude=True)
    """Whether neither a setting nor a variable named the number."""

    def line(self) -> str:
        """Return the choice as text."""
        return f"{self.count} ({self.reason})"


def pick_threads(*, asked: int | None, values: int | None = None, ranks: int = 1) -> ThreadChoice:
    """Return the number of threads of this process.

    Args:
        asked: number of the settings; None to choose it.
        values: values in a layer of the main model; None means enough for any number of threads.
        ranks: processes that share this machine.
    """
    import torch

    named = named_threads(os.environ, asked=asked, now=torch.get_num_threads())
    if named is not None:
        return named
    useful = None if values is None else values // _VALUES_PER_THREAD
    return choose_threads(read_cores(), useful=useful, ranks=ranks)


def choose_threads(cores: Cores, *, useful: int | None = None, ranks: int = 1) -> ThreadChoice:
    """Return the number of threads of each of `ranks` processes on these cores.

    Each process has work for `useful` threads; None means for any number.
    """
    reasons = [f"{cores.allowed} {'core' if cores.allowed == 1 else 'cores'}"]
    free = float(cores.allowed)
    if cores.quota is not None and cores.quota < free:
        free = cores.quota
        reasons.append(f"the quota is {cores.quota:g}")
    if ranks > 1:
        free /= ranks
        reasons.append(f"{ranks} processes")
    count = max(1, math.floor(free + _ROUNDED_UP))
    if useful is not None and useful < count:
        count = max(1, useful)
        reasons.append(f"work for {count}")
    return ThreadChoice(count=count, reason=", ".join(reasons), is_free=True)


def named_threads(environment: Mapping[str, str], *, asked: int | None, now: int) -> ThreadChoice | None:
    """Return the number that a user has chosen: `asked`, or `now` if a variable has set it; None without either.

    A variable of `variables_of_ranks` is not the user's.
    """
    if asked is not None:
        return ThreadChoice(count=asked, reason="as set")
    named = [name for name in VARIABLES if environment.get(name)]
    if named == ["OMP_NUM_THREADS"] and environment["OMP_NUM_THREADS"] == environment.get(RANK_VARIABLE):
        return None
    return ThreadChoice(count=now, reason=first_few(named)) if named else None


def variables_of_ranks(environment: Mapping[str, str], *, ranks: int) -> dict[str, str]:
    """Return variables that limit the threads of each of `ranks` processes until they choose their number.

    Processes that each take all cores slow each other down. The result is empty if the user has chosen.
    """
    if any(environment.get(name) for name in VARIABLES):
        return {}
    count = str(choose_threads(read_cores(), ranks=ranks).count)
    return {"OMP_NUM_THREADS": count, RANK_VARIABLE: count}


@contextmanager
def threads_used(choice: ThreadChoice, reporter: Reporter) -> Iterator[None]:
    """Let torch compute with so many threads inside the block, and note the number and the reason.

    Raises RequestError if this process was forked from a process that has computed with several threads: OpenMP would
    wait forever for threads that a fork does not copy.
    """
    global _computed_in
    import torch

    if choice.count > 1:
        if _computed_in not in (None, os.getpid()):
            raise RequestError(
                f"this process was forked from one that has computed, and cannot compute with {choice.count} threads",
                hint='start it by multiprocessing.get_context("spawn"), or let it compute with one thread',
            )
        _computed_in = os.getpid()
    reporter.note(f"threads: {choice.line()}")
    before = torch.get_num_threads()
    torch.set_num_threads(choice.count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
