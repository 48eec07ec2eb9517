"""`osora data cache`: every clip that training can ask for, encoded once."""

from pathlib import Path

from opensora_cli.checkpoint.formats.peft import require_peft
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.threads import ThreadChoice, pick_threads, threads_used
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.data.early import refuse_early
from opensora_cli.engine.encode.clip_cache import ClipCache, threads_of
from opensora_cli.engine.encode.fill_cache import FailedClip, fill_cache
from opensora_cli.settings.train import TrainSettings


class CacheReport(Document):
    """What `osora data cache` did."""

    SCHEMA = "osora.data-cache/1"

    folder: Path
    clips: int
    """In the cache now."""
    encoded: int
    """Of these, by this run."""
    failed: tuple[FailedClip, ...]

    def lines(self) -> list[str]:
        """Return the result for people."""
        return [
            f"{self.folder}  {self.clips} clips, {self.encoded} of them encoded now",
            *(f"failed  {clip.path}: {clip.reason}" for clip in self.failed),
        ]

    def raise_for_problems(self) -> None:
        """Raise BatchError if clips could not be read."""
        if self.failed:
            raise BatchError(
                f"{len(self.failed)} of {len(self.failed) + self.clips} clips could not be read",
                hint="fix them and rerun; training skips clips that the cache lacks",
            )


def cache_clips(settings: TrainSettings, *, reporter: Reporter | None = None) -> CacheReport:
    """Encode what `train_mmdit.cache` lacks of the clips that `data` has, with one process.

    What it has of a file that was replaced since is encoded again. Interrupted, it keeps what is finished, and
    continues there the next time.

    Raises:
        RequestError: the transformer is not what is trained, or no cache is named.
        CheckpointError: frozen parts, or files of the cache, are missing or broken.
        FileProblem: the cache was made with other parts, or the table cannot be read.
        OutputError: the cache cannot be written.
        HardwareError: there is no such device, or the adapter that the cache is for needs PEFT.
        KeyboardInterrupt: its argument is how to continue.
    """
    refuse_early(settings)
    if settings.lora.is_on:
        # Training would find out after everything was encoded.
        require_peft()
    reporter = reporter or SilentReporter()
    device = pick_hardware(settings.device_name, "float32").device
    assert settings.train_mmdit.cache is not None
    folder = Path(settings.train_mmdit.cache)
    with threads_used(_threads(settings, folder), reporter):
        encoded, failed = fill_cache(settings, device=device, reporter=reporter)
    return CacheReport(folder=folder, clips=len(ClipCache(folder)), encoded=encoded, failed=tuple(failed))


def _threads(settings: TrainSettings, folder: Path) -> ThreadChoice:
    """Return as many threads as the cache was begun with, since sums depend on it, unless a user named a number."""
    threads = pick_threads(asked=settings.threads)
    begun_with = threads_of(folder) if threads.is_free else None
    if begun_with is None or begun_with == threads.count:
        return threads
    return ThreadChoice(count=begun_with, reason="as the cache was begun, for the same sums")
