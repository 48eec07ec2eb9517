"""First line of every plan: whether a request fits in memory, and how long it takes."""

from opensora_cli.core.device import GIB
from opensora_cli.core.documents import Document


class HostMemory(Document):
    """Host memory of a machine, in addition to the memory of its devices."""

    pinned_bytes: int
    """Page-locked copies of weights, and offloaded activations and optimizer states."""
    page_cache_bytes: int
    """Files of weights. With less memory the run still works, and reads them from the disk again."""

    def line(self) -> str:
        """Return the parts as text."""
        return f"page-locked {gib(self.pinned_bytes)}, page cache {gib(self.page_cache_bytes)} for files of weights"


def verdict_line(
    *, needed: int, usable: int | None, fits: bool | None, on_gpu: bool, host: HostMemory, seconds: float | None
) -> str:
    """Return the verdict of a plan for a device with `usable` bytes; None means that its memory is not known."""
    memory = "GPU memory" if on_gpu else "host memory"
    if usable is None:
        shown = f"Unknown: {gib(needed)} {memory}"
    else:
        shown = f"{'Fits' if fits else 'Does not fit'}: {needed / GIB:.1f} of {gib(usable)} {memory}"
    if on_gpu:
        shown += f", {gib(host.pinned_bytes + host.page_cache_bytes)} host memory"
    elif host.page_cache_bytes >= 0.05 * GIB:
        shown += f", {gib(host.page_cache_bytes)} page cache"
    return shown if seconds is None else f"{shown}, about {_about(seconds)} (predicted)"


def gib(num_bytes: int) -> str:
    """Return a size with one decimal."""
    return f"{num_bytes / GIB:.1f} GiB"


def _about(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
