"""`memory.checkpointing=auto`: as little is computed again in backward as the memory of the device asks for.

What is held grows along a ladder. On its first step every block is checkpointed and keeps nothing. On the next ones the
last block, then the last two and so on keep the results that cost most operations a byte; then those that cost less;
and at its end no block is checkpointed. The highest step whose estimated memory fits is taken.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import nn

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.launch.rank import device_type, rank_device
from opensora_cli.engine.train.activations import ActivationPlan, KeptResults, Recomputed, plan_activations
from opensora_cli.engine.train.estimate import TrainingMemory, estimate_training
from opensora_cli.engine.train.rank_memory import RankMemory, first_ranks
from opensora_cli.memory.checkpointing import RECOMPUTING
from opensora_cli.memory.kept_results import Cost, CostCounter
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.settings.train import TrainSettings, TrainTarget
from opensora_cli.settings.train_loop import AUTO, WeightOffload

_SHARE = 0.9
"""Of the free memory that may be planned for: estimates are right to a tenth, and allocators leave gaps."""
_ALIKE = 0.9
"""Results whose costs a byte are as close as that are one step, so that ranks with other shares of tokens agree."""
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rank may hold."""

    height: float
    """On the ladder, 0 (all is computed again) to 1."""
    plan: ActivationPlan
    memory: TrainingMemory


def chooses(settings: TrainSettings) -> bool:
    """Whether what is computed again is to be chosen."""
    return settings.target is TrainTarget.MMDIT and settings.memory.checkpointing == AUTO


def choose_for_ranks(
    settings: TrainSettings, *, free_bytes: int, is_gpu: bool, reporter: Reporter
) -> tuple[ActivationPlan, tuple[RankMemory, ...]]:
    """Return what fits on every rank, each of which has so much memory free, and what each then holds.
    It raises what `estimate_ranks` raises.
    """
    alike = first_ranks(settings)
    choices = {
        rank: choose_activations(settings, rank=rank, free_bytes=free_bytes, is_gpu=is_gpu, reporter=reporter)
        for rank in sorted(set(alike))
    }
    plan = min(choices.values(), key=lambda choice: choice.height).plan
    memory = {
        rank: choice.memory if choice.plan == plan else estimate_training(settings, rank=rank, activations=plan)
        for rank, choice in choices.items()
    }
    return plan, tuple(RankMemory.of(rank, memory[first]) for rank, first in enumerate(alike))


def choose_here(settings: TrainSettings, *, context: RankContext | None = None, reporter: Reporter) -> Choice | None:
    """Return what this process may hold on its device; None: that is not chosen, or cannot be.

    To be called before a rank joins the others. Raises HardwareError if there is no such device.
    """
    if not chooses(settings):
        return None
    name = settings.device_name
    if context is not None:
        name = str(rank_device(context, device_type(settings.device)))
    hardware = pick_hardware(name, "float32")
    is_gpu, rank = hardware.device.type == "cuda", 0 if context is None else context.rank
    free = hardware.free_bytes // (1 if is_gpu else settings.parallel.ranks_per_node)
    try:
        return choose_activations(settings, rank=rank, free_bytes=free, is_gpu=is_gpu, reporter=reporter)
    except HardwareError as error:
        reporter.warn(f"all blocks are checkpointed: {error.message}")
        return None


def agreed_choice(choice: Choice | None, *, ranks: int) -> ActivationPlan | None:
    """Return what the rank may hold that may hold the least, on all ranks, which must all call this."""
    if choice is None or ranks == 1:
        return None if choice is None else choice.plan
    found = all_gather_json([choice.height, choice.plan.model_dump(mode="json")])
    _, least = min(found, key=lambda each: float(each[0]))
    return ActivationPlan.model_validate({**least, "dtype": choice.plan.dtype})


def choose_activations(
    settings: TrainSettings, *, rank: int, free_bytes: int, is_gpu: bool, reporter: Reporter
) -> Choice:
    """Return the least that can be computed again with `free_bytes` on the device of a rank.

    If nothing fits, it is what takes the least memory. It raises what `estimate_training` raises.
    """
    most = _SHARE * free_bytes

    def peak(memory: TrainingMemory) -> int:
        return memory.device_peak_bytes if is_gpu else memory.peak_bytes

    with reporter.stage("choose what is computed again", unit="plans") as progress, torch.random.fork_rng(devices=[]):

        def estimated(step: int) -> TrainingMemory:
            memory = estimate_training(settings, rank=rank, activations=ladder.plan(step))
            progress.advance()
            return memory

        costs: dict[str, list[Cost]] = {}
        stacks = [stack.module_path for stack in repeated_blocks(mmdit_config(settings.model)) if stack.count]
        least = estimate_training(settings, rank=rank, watch=partial(_noting_costs, stacks, costs))
        progress.advance()
        ladder = _Ladder.of(settings, {} if settings.compile else costs)
        if peak(least) > most:
            return Choice(0.0, ladder.plan(0), least)
        needed = [peak(least) + held for held in ladder.held()]
        if needed[-1] <= most and ladder.top >= len(needed):
            everything = estimated(ladder.top)
            if peak(everything) <= most:
                return Choice(1.0, ladder.plan(ladder.top), everything)
            # Blocks that are not checkpointed take about as much, each.
            more = (peak(everything) - needed[-1]) / (ladder.top + 1 - len(needed))
            needed += [needed[-1] + round(count * more) for count in range(1, ladder.top + 1 - len(needed))]
        room = most - peak(least)
        for _ in range(_TRIES):
            step = bisect_right(needed, peak(least) + room) - 1
            if step <= 0:
                break
            memory = estimated(step)
            if peak(memory) <= most:
                return Choice(step / ladder.top, ladder.plan(step), memory)
            # What is held takes so many times what was thought.
            room *= (most - peak(least)) / (peak(memory) - peak(least))
    return Choice(0.0, ladder.plan(0), least)


@dataclass(frozen=True, slots=True)
class _Ladder:
    """What can be held, from the least to the most."""

    least: ActivationPlan
    levels: tuple[float, ...]
    """Operations a byte, falling."""
    costs: Mapping[str, Sequence[Cost]]
    """Of a block of each stack."""
    may_leave_out: bool
    """Whether blocks may be without a checkpoint."""

    @classmethod
    def of(cls, settings: TrainSettings, costs: Mapping[str, Sequence[Cost]]) -> "_Ladder":
        least = plan_activations(settings)
        assert least is not None
        levels: list[float] = []
        for each in sorted({cost.operations_a_byte for of in costs.values() for cost in of}, reverse=True):
            if levels and each > _ALIKE * levels[-1]:
                levels[-1] = each
            else:
                levels.append(each)
        # Weights that are streamed come again with the second forward pass of their block.
        streams = settings.memory.offload is WeightOffload.BLOCKS
        return cls(least, tuple(levels), costs, may_leave_out=not streams)

    @property
    def top(self) -> int:
        """The last step."""
        return (len(self.levels) + self.may_leave_out) * self._blocks

    @property
    def _blocks(self) -> int:
        return sum(self.least.checkpointed_blocks.values())

    def plan(self, step: int) -> ActivationPlan:
        """Return what is held on a step."""
        level, last = divmod(step, self._blocks)
        if level > len(self.levels):
            level, last = level - 1, self._blocks
        checkpointed, kept = self.least.checkpointed_blocks, []
        if level == len(self.levels):
            left_out = self._last(last)
            checkpointed = {path: count - left_out[path] for path, count in checkpointed.items()}
        elif last:
            kept.append(KeptResults(operations_a_byte=self.levels[level], blocks=self._last(last)))
        if level and any(checkpointed.values()):
            kept.append(KeptResults(operations_a_byte=self.levels[level - 1], blocks=checkpointed))
        plan = self.least.model_copy(update={"checkpointed_blocks": checkpointed, "kept": tuple(kept)})
        return plan.model_copy(update={"recomputed": self._recomputed(plan)})

    def held(self) -> list[int]:
        """Return the bytes of the results that are kept, on each step on which all blocks are checkpointed."""
        found = [0]
        above = inf
        for level in self.levels:
            for path, count in reversed(self.least.checkpointed_blocks.items()):
                kept = (cost for cost in self.costs.get(path, ()) if level <= cost.operations_a_byte < above)
                held = round(sum(cost.operations / cost.operations_a_byte for cost in kept))
                found += [found[-1] + held * number for number in range(1, count + 1)]
            above = level
        return found

    def _last(self, count: int) -> dict[str, int]:
        """Return how many of each stack are among the last blocks of the model."""
        found = {}
        for path, blocks in reversed(self.least.checkpointed_blocks.items()):
            found[path] = min(count, blocks)
            count -= found[path]
        return {path: found[path] for path in self.least.checkpointed_blocks}

    def _recomputed(self, plan: ActivationPlan) -> Recomputed | None:
        if not any(self.costs.values()):
            return None
        keep = plan.keep()
        done, again = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
        for path, costs in self.costs.items():
            for index in range(self.least.checkpointed_blocks[path]):
                is_checkpointed = index < plan.checkpointed_blocks[path]
                kept_from = keep.get(f"{path}.{index}", inf)
                for cost in costs:
                    done[cost.is_attention] += cost.operations
                    if is_checkpointed and cost.operations_a_byte < kept_from:
                        again[cost.is_attention] += cost.operations
        return Recomputed(
            products=again[False] / max(done[False], 1.0),
            attention=again[True] / max(done[True], 1.0),
            operations=sum(again.values()) / max(sum(done.values()), 1.0),
        )


@contextmanager
def _noting_costs(stacks: Sequence[str], found: dict[str, list[Cost]], module: nn.Module) -> Iterator[None]:
    """Note in `found` what the first block of each stack computes again in its first backward pass."""

    def context(path: str) -> AbstractContextManager[object]:
        return nullcontext() if path in found else CostCounter(found.setdefault(path, []))

    with ExitStack() as stack:
        for path in stacks:
            attributes = vars(module.get_submodule(f"{path}.0"))
            attributes[RECOMPUTING] = partial(context, path)
            stack.callback(attributes.pop, RECOMPUTING)
        yield
