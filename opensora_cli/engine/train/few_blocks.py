"""Memory of a step through many blocks, from a step through few: every block of a kind adds the same number of bytes.

Three blocks of each kind run: the first, the last, and one that represents all others. The bytes that the others hold
while different blocks run are a multiple of its bytes. While they run, they need no more than the first or the last.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.train.memory import plan_activations
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.settings.train import TrainSettings

FEW = 3
"""Number of blocks of a kind."""


def with_few_blocks(settings: TrainSettings) -> tuple[TrainSettings, dict[str, int]]:
    """Return settings with few blocks of each kind, and path of a block -> number of blocks that it represents.

    Checkpointed blocks are a different kind from the later blocks of their stack.
    """
    if not settings.trains_transformer:
        return settings, {}
    # Evaluations of an adapter and its teacher take turns, and one needs the memory of all.
    changes: dict[str, object] = {"train_distill.steps": 1, "train_distill.teacher_steps": 1}
    times: dict[str, int] = {}
    plan, depths = plan_activations(settings), ("model.depth", "model.depth_single_blocks")
    numbers = "memory.checkpoint_double_blocks", "memory.checkpoint_single_blocks"
    given = settings.memory.checkpoint_double_blocks, settings.memory.checkpoint_single_blocks
    stacks = repeated_blocks(mmdit_config(settings.model))
    for stack, depth, number, checkpointed in zip(stacks, depths, numbers, given, strict=True):
        path = stack.module_path
        first = 0 if plan is None else plan.checkpointed_blocks[path]
        place = {0: 0}
        for start, stop in pairwise(sorted({0, first, stack.count})):
            if stop - start > FEW:
                times[f"{path}.{place[start] + 1}"] = stop - start - FEW + 1
            place[stop] = place[start] + min(stop - start, FEW)
        changes[depth] = place[stack.count]
        # Without a number all blocks are checkpointed, as streamed blocks require.
        if checkpointed is not None:
            changes[number] = place[first]
    return settings.replace(changes), times


class FewBlocks:
    """Counter that multiplies the bytes of blocks that represent others.

    Args:
        counter: counter of a step of `module`.
        times: path of a block -> number of blocks it represents; the previous block is of the same kind.
        kept: function that returns the persistent tensors of a block: weights, averages and optimizer state.
    """

    def __init__(
        self, counter: TensorBytes, module: nn.Module, times: Mapping[str, int], kept: Callable[[str], Iterable[Tensor]]
    ) -> None:
        self._counter, self._module, self._times = counter, module, times
        self._kept = {path: counter.storages_of(kept(path)) for path in times}
        self._forward: dict[str, list[int]] = {path: [] for path in times}
        """Positions on the timeline of the forward ends of the previous block, the block and the next one, in turn."""
        self._backward: dict[str, list[int]] = {path: [] for path in times}
        """Positions where the backward passes of these three blocks begin, in backward order."""
        self._between: list[int] = []
        """Positions before and after each forward pass of the module, where no block runs."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the positions of blocks on the timeline inside the context."""
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
                # Tensors that its backward pass frees, tensors that no backward pass frees, and its gradients.
                found |= dict.fromkeys((held & first - last) | (held & made - waiting) | (after & last - first), times)
                spans.append((begin, end))
        return counter.repeated(found, one_by_one=spans)

    @property
    def _now(self) -> int:
        return len(self._counter.changes)

    def _noting(self, path: str) -> Callable[..., None]:
        """Return a hook for a block; its backward pass begins with the first gradient of its results."""

        def note(_: nn.Module, inputs: object, result: Any) -> None:
            learned = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
            if not learned:
                return  # An evaluation without gradients holds nothing for backward.
            self._forward[path].append(self._now)
            notes = [self._backward[path]]

            def once(_: Tensor) -> None:
                if notes:
                    notes.pop().append(self._now)

            for tensor in learned:
                tensor.register_hook(once)  # type: ignore[no-untyped-call]

        return note
