"""Whether a CPU has the memory that a training takes next: the kernel ends a process that finds none, without a word.

On a GPU an allocation that fails is an error like others.
"""

import sys

import psutil  # type: ignore[import-untyped]  # it ships none
import torch

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.engine.components.hardware import peak_resident_bytes
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.activations import ActivationPlan, layer_values
from opensora_cli.engine.train.build import count_parameters
from opensora_cli.engine.train.estimate import ACTIVATIONS, OPTIMIZER, estimate_training
from opensora_cli.engine.train.fake_ranks import BUFFERS, GRADIENTS
from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.settings.train import TrainSettings

_LAYERS = 1000
"""More than a step holds: the released transformer keeps 300 times the values of a layer for its backward pass."""
_COPIES = 8
"""Of the weights, more than gradients, their buckets and moments are."""

STEP = "a step"


def first_step_bytes(
    settings: TrainSettings,
    *,
    rank: int = 0,
    activations: ActivationPlan | None = None,
    has_moments: bool,
    reporter: Reporter,
) -> int:
    """Return what the first step will take on a CPU, beside what is loaded before it; 0 where there is plenty.

    To be called before a rank joins the others. `activations` None: as `plan_activations` has it. `has_moments`: a
    checkpoint has them. Raises RequestError if sizes contradict each other.
    """
    if device_type(settings.device_name) != "cpu":
        return 0
    plenty = 4 * (_LAYERS * layer_values(settings) + _COPIES * count_parameters(settings))
    if read_private_memory().free_bytes >= plenty * settings.parallel.ranks_per_node:
        return 0
    try:
        with reporter.stage("estimate memory"), torch.random.fork_rng(devices=[]):
            memory = estimate_training(settings, rank=rank, activations=activations)
    except HardwareError as error:
        reporter.warn(error.message)
        return 0
    taken = (GRADIENTS, BUFFERS, ACTIVATIONS, *(() if has_moments else (OPTIMIZER,)))
    return sum(memory.at_peak[kind] for kind in taken)


class Room:
    """Compares what steps, validations and samples have taken at most with the memory that there is, before the next.

    Of the first, when everything is loaded, `first_step_bytes` is all that is known.
    """

    def __init__(self, distribution: Distribution, *, ranks_per_node: int, first_step_bytes: int) -> None:
        self._ranks = distribution.ranks
        self._ranks_per_node = ranks_per_node
        self._first_step_bytes = first_step_bytes
        self._is_needed = distribution.device.type == "cpu" and sys.platform == "linux"
        self._most: dict[str, int] = {}
        self._highest = 0
        self._last = STEP

    def lack(self, what: str) -> str | None:
        """Return what is missing now for `what`, one of the kinds of work, such as `STEP`; None: nothing that is known.

        All ranks must call it right before that work, and get the same.
        """
        if not self._is_needed:
            return None
        own = self._needed(what), read_private_memory().free_bytes
        of_ranks = [own] if self._ranks == 1 else all_gather_json(own)
        for first in range(0, self._ranks, self._ranks_per_node):
            of_node = of_ranks[first : first + self._ranks_per_node]
            needed, free = sum(needed for needed, _ in of_node), min(free for _, free in of_node)
            if needed > free:
                where = f" on {len(of_node)} ranks" if len(of_node) > 1 else ""
                return (
                    f"{what}{where} needs {format_bytes(needed)} more memory, and by now {format_bytes(free)} are free"
                )
        return None

    def _needed(self, what: str) -> int:
        held, shared, highest = _read_process()
        if not self._most:
            self._most[STEP], self._highest = held + self._first_step_bytes, highest
        if highest > self._highest:
            # Pages of files are no memory that must be had.
            self._most[self._last] = max(self._most.get(self._last, 0), highest - shared)
            self._highest = highest
        self._last = what
        # What has set no new peak took no more than a step, and without memory for a step nothing can go on.
        return max(0, max(self._most[STEP], self._most.get(what, 0)) - held)


def _read_process() -> tuple[int, int, int]:
    """Return the bytes that this process has for itself, those that it shares, and the most of both at any time."""
    now = psutil.Process().memory_info()
    return now.rss - now.shared, now.shared, peak_resident_bytes()
