"""The bytes of a step through many blocks, from a step through few: blocks of a kind are alike, and each adds the same.

Of each kind three blocks run: the first, the last, and one that stands for all between. What those hold while others
run is so many times what the one holds; while they run themselves, they need no more than the first or the last does.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.train.activations import ActivationPlan
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.settings.train import TrainSettings, TrainTarget

FEW = 3
"""Blocks of a kind."""


def with_few_blocks(
    settings: TrainSettings, plan: ActivationPlan | None
) -> tuple[TrainSettings, ActivationPlan | None, dict[str, int]]:
    """Return both with few blocks of each kind, and path of a block -> how many it stands for.

    Checkpointed blocks are another kind than those behind them in their stack.
    """
    if settings.target is not TrainTarget.MMDIT:
        return settings, plan, {}
    depths, checkpointed = [], {}
    times: dict[str, int] = {}
    for stack in repeated_blocks(mmdit_config(settings.model)):
        path = stack.module_path
        first = 0 if plan is None else plan.checkpointed_blocks[path]
        place = {0: 0}
        for start, stop in pairwise(sorted({0, first, stack.count})):
            if stop - start > FEW:
                times[f"{path}.{place[start] + 1}"] = stop - start - FEW + 1
            place[stop] = place[start] + min(stop - start, FEW)
        checkpointed[path] = place[first]
        depths.append(place[stack.count])
    changes = dict(zip(("model.depth", "model.depth_single_blocks"), depths, strict=True))
    if plan is None:
        return settings.replace(changes), None, times
    for name, count in zip(
        ("checkpoint_double_blocks", "checkpoint_single_blocks"), checkpointed.values(), strict=True
    ):
        # Without a number it is all of them, as streamed blocks need it.
        if getattr(settings.memory, name) is not None:
            changes[f"memory.{name}"] = count
    return settings.replace(changes), plan.model_copy(update={"checkpointed_blocks": checkpointed}), times


class FewBlocks:
    """Counts the bytes of blocks that stand for others as often as there are these.

    Args:
        counter: counts a step of `module`.
        times: path of a block -> how many it stands for; the block before it is of the same kind.
        kept: what there is of a block all the time: its weights, and what is kept for them.
    """

    def __init__(
        self, counter: TensorBytes, module: nn.Module, times: Mapping[str, int], kept: Callable[[str], Iterable[Tensor]]
    ) -> None:
        self._counter, self._module, self._times = counter, module, times
        self._kept = {path: counter.storages_of(kept(path)) for path in times}
        self._forward: dict[str, list[int]] = {path: [] for path in times}
        """Where on the timeline the block before it ends, it itself, and the block behind it, in turn."""
        self._backward: dict[str, list[int]] = {path: [] for path in times}
        """Where these three begin, in the order of the backward pass."""
        self._between: list[int] = []
        """Where none runs, before and after each forward pass of the module."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note where blocks run, inside the block."""
        with ExitStack() as hooks:
            for register in (self._module.register_forward_pre_hook, self._module.register_forward_hook):
                hooks.callback(register(lambda *_: self._between.append(self._now)).remove)
            for path in self._times:
                name, _, index = path.rpartition(".")
                for each in range(int(index) - 1, int(index) + 2):
                    block = self._module.get_submodule(f"{name}.{each}")
                    hooks.callback(block.register_forward_hook(self._noting(path)).remove)
            yield

    def counted(self) -> TensorBytes:
        """Return the timeline of all blocks."""
        counter, ends = self._counter, [*self._between, len(self._counter.changes)]
        found: dict[int, int] = {}
        spans: list[tuple[int, int]] = []
        for path, times in self._times.items():
            found |= dict.fromkeys(self._kept[path], times)
            forward, backward = iter(self._forward[path]), iter(self._backward[path])
            for start, stop, _, behind, begin, end in zip(*[forward] * 3, *[backward] * 3, strict=True):
                made = {change.storage for change in counter.changes[start:stop]}
                index = bisect_left(ends, end)
                positions = (ends[index - 1], behind, begin, end, ends[index])
                held, waiting, first, last, after = (counter.live_at(position).keys() for position in positions)
                # What its backward pass lets go of, what nobody's does, and its gradients.
                found |= dict.fromkeys((held & first - last) | (held & made - waiting) | (after & last - first), times)
                spans.append((begin, end))
        return counter.repeated(found, one_by_one=spans)

    @property
    def _now(self) -> int:
        return len(self._counter.changes)

    def _noting(self, path: str) -> Callable[..., None]:
        """Return a hook for a block; its backward pass begins with the first gradient of its results."""

        def note(_: nn.Module, inputs: object, result: Any) -> None:
            self._forward[path].append(self._now)
            notes = [self._backward[path]]

            def once(_: Tensor) -> None:
                if notes:
                    notes.pop().append(self._now)

            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(once)  # type: ignore[no-untyped-call]

        return note
