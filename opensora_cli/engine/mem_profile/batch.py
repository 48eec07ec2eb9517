"""Search for the largest batch that fits: doubling until a batch does not fit, then bisection."""

from collections.abc import Callable

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.mem_profile.report import LargestBatch
from opensora_cli.engine.train.memory import with_batch_size
from opensora_cli.engine.train.plan import estimate_rank
from opensora_cli.settings.train import TrainSettings

MOST = 1024
"""Largest batch that is tried."""


def largest_batch(peak_of: Callable[[int], int | None], *, limit_bytes: int, most: int = MOST) -> LargestBatch:
    """Search for the largest batch whose peak is at most `limit_bytes`, up to `most`.

    `peak_of` returns the bytes of a batch; None means that it ran out of memory.
    """
    peaks = {0: 0}

    def fits(size: int) -> bool:
        peak = peak_of(size)
        peaks[size] = peak or 0
        return peak is not None and peak <= limit_bytes

    best, size = 0, 1
    while size <= most and fits(size):
        best, size = size, size * 2
    too_large = min(size, most + 1)
    while too_large - best > 1:
        middle = (best + too_large) // 2
        best, too_large = (middle, too_large) if fits(middle) else (best, middle)
    return LargestBatch(batch_size=best, limit_bytes=limit_bytes, peak_bytes=peaks[best])


def training_batch(settings: TrainSettings, *, limit_bytes: int, reporter: Reporter) -> LargestBatch:
    """Predict the largest micro-batch of a rank, by the bytes of the verdict; the batch of the settings is ignored."""
    on_gpu = device_type(settings.device_name) != "cpu"
    with reporter.stage("batch", unit="attempts") as progress:

        def peak_of(size: int) -> int:
            memory = estimate_rank(with_batch_size(settings, size))
            progress.advance()
            return memory.device_peak_bytes if on_gpu else memory.peak_bytes - memory.mapped_bytes

        return largest_batch(peak_of, limit_bytes=limit_bytes)
