"""Progress, previews, cancellation and saved state of a run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.formatting import duration
from opensora_cli.core.progress import Reporter, StageProgress
from opensora_cli.core.ranks import report_left
from opensora_cli.engine.components.hardware import out_of_memory_reported
from opensora_cli.engine.generate.outputs import SampleFiles, continue_command
from opensora_cli.engine.generate.sample import remove_latents


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Functions of a program that runs generations, such as a server."""

    is_cancelled: Callable[[], bool] = lambda: False
    """Asked after each step. The run then saves its state and raises KeyboardInterrupt, as for Ctrl-C."""
    wants_state: Callable[[], bool] = lambda: False
    """Asked after each step whether to save the state."""
    on_preview: Callable[[Path], None] = lambda path: None
    """Called with each preview that is written."""


class Events:
    """Report stages and their times, and list the saved files of a run that ends early.

    The `role` of a job is a prefix of the names of its stages; None for the video.
    """

    def __init__(self, reporter: Reporter, *, hooks: Hooks | None = None, role: str | None = None) -> None:
        self.reporter = reporter
        self.hooks = hooks or Hooks()
        self.timings_s: dict[str, float] = {}
        """Seconds of each stage."""
        self._prefix = "" if role is None else f"{role} "
        self._saved_at = time.monotonic()
        self._files: Sequence[SampleFiles] = ()
        self._finished: list[Path] = []

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Show and time a stage of `total` units of work (None: unknown); may raise OutOfMemoryError."""
        with self.timed(name), self.reporter.stage(f"{self._prefix}{name}", total=total, unit=unit) as progress:
            yield progress

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block, without stages inside it, to `timings_s[name]`; may raise OutOfMemoryError."""
        start, timed_s = time.perf_counter(), sum(self.timings_s.values())
        hint = "ask for a smaller --res or fewer --num-frames, or close what else uses the device"
        try:
            with out_of_memory_reported(f" in the stage {self._prefix}{name}", hint=hint):
                yield
        finally:
            inside_s = sum(self.timings_s.values()) - timed_s
            self.timings_s[name] = self.timings_s.get(name, 0.0) + time.perf_counter() - start - inside_s

    def check_cancelled(self) -> None:
        if self.hooks.is_cancelled():
            raise KeyboardInterrupt

    @contextmanager
    def of_job(self, role: str) -> Iterator["Events"]:
        """Yield the events of another job of the chain, such as a picture. Its results are not listed."""
        events = Events(self.reporter, hooks=self.hooks, role=role)
        try:
            yield events
        finally:
            self.timings_s |= {f"{role} {name}": seconds for name, seconds in events.timings_s.items()}

    def report_left(self) -> None:
        """Report the files of the run to its launcher, which shows them if this process is killed."""
        report_left(self._left)

    def complete(self, sample: SampleFiles) -> None:
        """Record a finished result, and remove the latents that were saved for it unless a run can continue them."""
        self._finished.append(sample.media)
        if sample.latents is not None and sample.settings.sampling.stop_at is None:
            remove_latents(sample.latents)
        self.report_left()

    def note_saved(self, path: Path) -> None:
        before, self._saved_at = self._saved_at, time.monotonic()
        self.reporter.note(f"saved {path} ({duration(self._saved_at - before)})")

    @contextmanager
    def rescue(self, files: Sequence[SampleFiles]) -> Iterator[None]:
        """Report finished samples and how to continue if the block ends early: in KeyboardInterrupt, or as warnings."""
        self._files = files
        self.report_left()
        try:
            yield
        except KeyboardInterrupt as interrupt:
            left = self._left() or ["nothing was finished yet: run it again"]
            raise KeyboardInterrupt("\n".join(left)) from interrupt
        except Exception as error:
            left = self._left()
            if not report_left(lambda: left):
                for line in left:
                    self.reporter.warn(line)
            if left:
                # Ctrl-C may surface as the failure of a watched collective; the lines are its hint then.
                error.add_note("\n".join(left))
            raise

    def _left(self) -> list[str]:
        lines, rest = [f"finished: {path}" for path in self._finished], 0
        for sample in self._files:
            is_finished = sample.media in self._finished
            if is_finished and sample.settings.sampling.stop_at is None:
                continue
            if (command := continue_command(sample)) is not None:
                lines.append(f"continue with: {command}")
            elif not is_finished:
                rest += 1
        if not (lines and rest):
            return lines
        # Without a sidecar no later run can tell which request has made a result.
        output = self._files[0].settings.output
        advice = ": the same command continues" if output.metadata and not output.overwrite else ""
        return [*lines, f"still to be made: {rest} of {len(self._files)} samples{advice}"]
