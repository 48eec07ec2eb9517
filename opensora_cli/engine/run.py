"""What every stage of a run shares: progress, timing, memory, and what is left when it ends early."""

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import Reporter, StageProgress


class RunRecord:
    """Times the stages of a run, and remembers what it has finished.

    Args:
        reporter: shows the stages.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.timings_s: dict[str, float] = {}
        self.finished: list[Path] = []
        """Results that are complete."""
        self.kept_latents: list[Path] = []
        """Latents whose results are not; those that were being saved when the run ended may not exist."""

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        """Show a stage and add its time to `timings_s[name]`.

        Args:
            name: of the stage.
            total: units of work; None: unknown.
            unit: what they are.

        Raises:
            HardwareError: the memory was not enough.
        """
        start = time.perf_counter()
        try:
            with self.reporter.stage(name, total=total, unit=unit) as progress:
                yield progress
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise HardwareError(
                f"out of memory in the stage {name}: {' '.join(str(error).split())[:200]}",
                hint="ask for a smaller --res or fewer --num-frames, or close what else uses the device",
            ) from error
        finally:
            self.timings_s[name] = self.timings_s.get(name, 0.0) + time.perf_counter() - start

    def finish(self, result: Path, latents: Path | None) -> None:
        """Remember a complete result, and remove the latents that were saved for it."""
        self.finished.append(result)
        if latents is not None:
            latents.unlink(missing_ok=True)
            self.kept_latents.remove(latents)

    @contextmanager
    def rescue(self) -> Iterator[None]:
        """When the block ends early, say what is finished and how to go on: in KeyboardInterrupt, or as warnings."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            left = self._what_is_left() or ["nothing was finished yet: run it again to start anew"]
            raise KeyboardInterrupt("\n".join(left)) from interrupt
        except Exception:
            for line in self._what_is_left():
                self.reporter.warn(line)
            raise

    def _what_is_left(self) -> list[str]:
        finished = [f"finished: {path}" for path in self.finished]
        kept = [
            f"go on with: osora generate --from-latents {shlex.quote(str(path))}"
            for path in self.kept_latents
            if path.is_file()
        ]
        return [*finished, *kept]


def _is_out_of_memory(error: Exception) -> bool:
    # The CPU allocator has no exception class of its own.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
