"""The stages of a run: shown, timed, retried when memory is short, and what is left when one ends early."""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torch import nn

from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.core.progress import Reporter, StageProgress
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.engine.components.hardware import OutOfMemoryError, out_of_memory_reported, release_memory
from opensora_cli.engine.generate.plan import ExecutionPlan, gib_or_less
from opensora_cli.engine.generate.targets import SampleFiles
from opensora_cli.memory.monitor import ModuleTimes, blocks_of

T = TypeVar("T")


class RunRecord:
    """Times and shows the stages of a run, and remembers what it has finished."""

    def __init__(
        self, reporter: Reporter, *, block_times: ModuleTimes | None = None, keeps_results: bool = True
    ) -> None:
        self.reporter = reporter
        self.block_times = block_times
        """Of the transformer; None: its blocks are not timed."""
        self._keeps_results = keeps_results
        self.timings_s: dict[str, float] = {}
        self.finished: list[Path] = []
        self.kept_latents: list[Path] = []
        """Latents whose results are not; those that were being saved when the run ended may not exist."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Show a stage of `total` units of work (None: unknown), and time it; may raise an OutOfMemoryError."""
        with self.timed(name), self.reporter.stage(name, total=total, unit=unit) as progress:
            yield progress

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `timings_s[name]`, but for what is timed inside it.

        Running out of memory inside is an OutOfMemoryError.
        """
        start, timed_s = time.perf_counter(), sum(self.timings_s.values())
        hint = "ask for a smaller --res or fewer --num-frames, or close what else uses the device"
        try:
            with out_of_memory_reported(f" in the stage {name}", hint=hint):
                yield
        finally:
            inside_s = sum(self.timings_s.values()) - timed_s
            self.timings_s[name] = self.timings_s.get(name, 0.0) + time.perf_counter() - start - inside_s

    @contextmanager
    def blocks_timed(self, transformer: nn.Module) -> Iterator[None]:
        """Time the blocks of the transformer inside the block, if that is wanted."""
        if self.block_times is None:
            yield
            return
        with self.block_times.watch(blocks_of(transformer, "transformer")):
            yield

    def complete(self, result: Path, latents: Path | None) -> None:
        """Remember a complete result, and remove the latents that were saved for it."""
        if self._keeps_results:
            self.finished.append(result)
        if latents is not None:
            latents.unlink(missing_ok=True)
            self.kept_latents.remove(latents)

    @contextmanager
    def rescue(self, files: Sequence[SampleFiles]) -> Iterator[None]:
        """When the block, which makes `files`, ends early, report what is finished and how to go on: in
        KeyboardInterrupt, or as warnings.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            left = self._what_is_left(files) or ["nothing was finished yet: run it again"]
            raise KeyboardInterrupt("\n".join(left)) from interrupt
        except Exception as error:
            left = self._what_is_left(files)
            for line in left:
                self.reporter.warn(line)
            if left:
                # Where Ctrl-C was pressed, and a collective that is watched failed instead, this is its hint.
                error.add_note("\n".join(left))
            raise

    def _what_is_left(self, files: Sequence[SampleFiles]) -> list[str]:
        finished = [f"finished: {path}" for path in self.finished]
        latents = [path for path in self.kept_latents if path.is_file()]
        kept = [f"go on with: osora generate --from-latents {shlex.quote(str(path))}" for path in latents]
        rest = len(files) - len(finished) - len(latents)
        if not (finished or kept) or rest <= 0:
            return [*finished, *kept]
        states = [f"{len(finished)} finished", *([f"{len(latents)} with saved latents"] if kept else [])]
        counts = f"of {len(files)} samples: {', '.join(states)}, {rest} still to be made"
        # Without a sidecar nobody knows which request has made a result.
        if files[0].sidecar is not None:
            counts += ": the same command goes on with " + ("it" if rest == 1 else "them")
            counts += ", once the saved latents are decoded" if kept else ""
        return [*finished, *kept, counts]


def with_room(
    plan: ExecutionPlan, stage: str, record: RunRecord, *, weights_are_there: bool = False, together: bool = False
) -> ExecutionPlan:
    """Return a plan whose `stage` fits into the memory that a CPU has now: others may have taken some since the plan.

    On a GPU, where an allocation that fails ends nothing, it is the plan itself.

    Args:
        plan: of the whole run.
        stage: which begins now.
        record: is told of a change.
        weights_are_there: the stage has its weights already.
        together: all ranks begin it now, and share the memory of their machine.

    Raises:
        OutOfMemoryError: there is too little, whatever is offloaded; where ranks share the memory, on all of them.
    """
    if plan.hardware.device.type != "cpu":
        return plan
    shares = together and plan.mesh.size > 1
    free = _free_for_each(plan) if shares else read_private_memory().free_bytes

    def needs(plan: ExecutionPlan) -> int:
        memory = next((each for each in plan.stages if each.name == stage), None)
        if memory is None:
            return 0
        return memory.total_bytes - (memory.weight_bytes if weights_are_there else 0)

    if needs(plan) <= free:
        return plan
    problem = (
        f"the stage {stage} needs {gib_or_less(needs(plan))} of memory for itself, and by now {gib_or_less(free)} are "
        "free"
    )
    if plan.mesh.size == 1:
        smaller = plan.with_offload(plan.fitting.choose(min(free, plan.budget_bytes)))
        if needs(smaller) <= free:
            record.reporter.warn(f"{problem}: going on with {'; '.join(smaller.offload.lines())}")
            return smaller
    raise OutOfMemoryError(problem, hint="close what else takes memory, or ask for a smaller --res or --num-frames")


def _free_for_each(plan: ExecutionPlan) -> int:
    """Return what each of the ranks of a machine can have, the least of all; none goes on before all have looked."""
    all_gather_json(None)
    free = read_private_memory().free_bytes // plan.settings.parallel.ranks_per_node
    return int(min(all_gather_json(free)))


def retried(
    run: Callable[[ExecutionPlan], T],
    plan: ExecutionPlan,
    stage: str,
    record: RunRecord,
    *,
    weights_are_there: bool = False,
    together: bool = True,
) -> tuple[T, ExecutionPlan]:
    """Run `run`; when it runs out of memory, again with stronger offload. Returns its result, and the plan of that.

    `run` does the work of `stage`, and leaves nothing on the device when it fails. The other arguments are those of
    `with_room`, which comes first. An OutOfMemoryError if the second attempt runs out of memory too, or there is
    nothing left to offload.
    """
    plan = with_room(plan, stage, record, weights_are_there=weights_are_there, together=together)
    try:
        return run(plan), plan
    except OutOfMemoryError as error:
        stronger = plan.with_stronger_offload(stage)
        if stronger is None:
            raise
        message = error.message
    # Only here, where the exception is gone, is what the first attempt had on the device gone with its traceback.
    release_memory(plan.hardware.device)
    record.reporter.warn(f"{message}; retrying with: {'; '.join(stronger.offload.lines())}")
    return run(stronger), stronger
