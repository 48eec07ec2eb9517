"""Progress, times, cancellation and saved state of a run."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opensora_cli.core.progress import Reporter, StageProgress
from opensora_cli.core.rank_link import report_left
from opensora_cli.engine.components.hardware import out_of_memory_reported
from opensora_cli.engine.components.linear_products import LinearProductsReport
from opensora_cli.engine.generate.targets import SampleFiles, remove_latents


class RunRecord:
    """Times and shows the stages of a run, and remembers what it has finished."""

    def __init__(
        self,
        reporter: Reporter,
        *,
        cancel: threading.Event | None = None,
        keeps_results: bool = True,
        of: str | None = None,
    ) -> None:
        self.reporter = reporter
        self._cancel = cancel
        self._of = of
        self.keeps_results = keeps_results
        """Whether the videos are results of the run, which are kept."""
        self.linear_products: LinearProductsReport | None = None
        """Errors of 8-bit products, once they are measured."""
        self.timings_s: dict[str, float] = {}
        self._files: Sequence[SampleFiles] = ()
        self._may_repeat = False
        self._finished: list[Path] = []
        self._kept_latents: dict[Path, tuple[SampleFiles, bool]] = {}

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Show a stage of `total` units of work (None: unknown), and time it; may raise an OutOfMemoryError."""
        with self.timed(name), self.reporter.stage(self._shown(name), total=total, unit=unit) as progress:
            yield progress

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to `timings_s[name]`, but for what is timed inside it.

        Running out of memory inside is an OutOfMemoryError.
        """
        start, timed_s = time.perf_counter(), sum(self.timings_s.values())
        hint = "ask for a smaller --res or fewer --num-frames, or close what else uses the device"
        try:
            with out_of_memory_reported(f" in the stage {self._shown(name)}", hint=hint):
                yield
        finally:
            inside_s = sum(self.timings_s.values()) - timed_s
            self.timings_s[name] = self.timings_s.get(name, 0.0) + time.perf_counter() - start - inside_s

    def stop_if_cancelled(self) -> None:
        """Raise KeyboardInterrupt, as Ctrl-C does, if the run was cancelled; called after each step."""
        if self._cancel is not None and self._cancel.is_set():
            raise KeyboardInterrupt

    def _shown(self, name: str) -> str:
        return name if self._of is None else f"{self._of} {name}"

    @contextmanager
    def part(self, of: str) -> Iterator["RunRecord"]:
        """Yield a record of a part of the run, whose stages are shown, and timed, under names that begin with `of`.

        No result of it is one of the run.
        """
        record = RunRecord(self.reporter, cancel=self._cancel, keeps_results=False, of=of)
        try:
            yield record
        finally:
            self.timings_s |= {record._shown(name): seconds for name, seconds in record.timings_s.items()}

    @contextmanager
    def keeping(self, latents: Path, sample: SampleFiles, *, is_begun: bool = False) -> Iterator[None]:
        """Remember latents that the block saves of a sample without a result; `is_begun`: nor have they all steps."""
        # First: an interruption may come before the call that makes the file returns.
        self._kept_latents[latents] = sample, is_begun
        yield
        report_left(self._what_is_left)

    def complete(self, result: Path, latents: Path | None) -> None:
        """Remember a complete result, and remove the latents that were saved for it."""
        if self.keeps_results:
            self._finished.append(result)
        if latents is not None:
            remove_latents(latents)
            self._kept_latents.pop(latents, None)
        report_left(self._what_is_left)

    @contextmanager
    def rescue(self, files: Sequence[SampleFiles], *, may_repeat: bool) -> Iterator[None]:
        """If the block, which makes `files`, ends early, report the finished files and how to continue: in
        KeyboardInterrupt, or as warnings. A launcher always knows it, also when this process is killed.

        `may_repeat` is whether the same command goes on with what is still to be made.
        """
        self._files, self._may_repeat = files, may_repeat
        self._kept_latents |= {
            sample.saved: (sample, sample.saved_steps is not None) for sample in files if sample.saved is not None
        }
        report_left(self._what_is_left)
        try:
            yield
        except KeyboardInterrupt as interrupt:
            left = self._what_is_left() or ["nothing was finished yet: run it again"]
            raise KeyboardInterrupt("\n".join(left)) from interrupt
        except Exception as error:
            left = self._what_is_left()
            if not report_left(lambda: left):
                for line in left:
                    self.reporter.warn(line)
            if left:
                # Where Ctrl-C was pressed, and a collective that is watched failed instead, this is its hint.
                error.add_note("\n".join(left))
            raise

    def _what_is_left(self) -> list[str]:
        finished = [f"finished: {path}" for path in self._finished]
        # Those that were being saved when the run ended may not exist.
        there = {path: kept for path, kept in self._kept_latents.items() if path.is_file()}
        kept = [f"go on with: {sample.command(path, is_begun=is_begun)}" for path, (sample, is_begun) in there.items()]
        rest = len(self._files) - len(finished) - len(there)
        if not (finished or kept) or rest <= 0:
            return [*finished, *kept]
        begun = sum(is_begun for _, is_begun in there.values())
        counts = {"finished": len(finished), "with saved latents": len(there) - begun, "begun": begun}
        states = [f"{count} {state}" for state, count in counts.items() if count or state == "finished"]
        line = f"of {len(self._files)} samples: {', '.join(states)}, {rest} still to be made"
        return [*finished, *kept, line + (": the same command goes on" if self._may_repeat else "")]
