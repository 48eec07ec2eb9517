"""`osora data cache`: encode every clip that training can use, once."""

from pathlib import Path

from opensora_cli.checkpoint.formats.peft import require_peft
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.threads import ThreadChoice, pick_threads, threads_used
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.encode.clip_cache import ClipCache, threads_of
from opensora_cli.engine.encode.fill_cache import FailedClip, fill_cache
from opensora_cli.engine.encode.inputs import require_cache_inputs
from opensora_cli.settings.train import TrainSettings


class CacheReport(Document):
    """Result of `osora data cache`."""

    SCHEMA = "osora.data-cache/1"

    folder: Path
    clips: int
    """Clips that are in the cache now."""
    encoded: int
    """Clips that this run encoded."""
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
    """Encode the clips of `data` that `train_mmdit.cache` lacks, in one process.

    Clips of a file that was replaced are encoded again. After an interruption the next run continues with the
    remaining clips.

    Raises:
        RequestError: the trained model is not the transformer, or no cache is named.
        CheckpointError: frozen parts, or files of the cache, are missing or broken.
        FileProblem: the cache was made with other parts, or the table cannot be read.
        OutputError: the cache cannot be written.
        HardwareError: the device is missing, or the adapter that the cache is for needs PEFT.
        KeyboardInterrupt: its argument says how to continue.
    """
    require_cache_inputs(settings)
    if settings.lora.is_on:
        # Otherwise training would fail after everything was encoded.
        require_peft()
    reporter = reporter or SilentReporter()
    device = pick_hardware(settings.device_name, "float32").device
    assert settings.train_mmdit.cache is not None
    folder = Path(settings.train_mmdit.cache)
    with threads_used(_threads(settings, folder), reporter):
        encoded, failed = fill_cache(settings, device=device, reporter=reporter)
    return CacheReport(folder=folder, clips=len(ClipCache(folder)), encoded=encoded, failed=tuple(failed))


def _threads(settings: TrainSettings, folder: Path) -> ThreadChoice:
    """Return the user's number of threads, or the one with which the cache was begun, since sums depend on it."""
    threads = pick_threads(asked=settings.threads)
    begun_with = threads_of(folder) if threads.is_free else None
    if begun_with is None or begun_with == threads.count:
        return threads
    return ThreadChoice(count=begun_with, reason="as the cache was begun, for the same sums")
