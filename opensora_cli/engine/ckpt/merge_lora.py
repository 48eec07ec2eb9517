"""`osora ckpt merge-lora`: add an adapter to the weights of its base model, or subtract it again."""

import math
from pathlib import Path
from typing import ClassVar

from opensora_cli.checkpoint.formats.lora_file import open_adapter
from opensora_cli.checkpoint.lora import merge, unmerge, unmerge_error
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.documents import Document
from opensora_cli.core.private_memory import freed_at_once
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.output import Product, WrittenDocument, check_product, write
from opensora_cli.engine.components.lora_files import fit_to_model, require_finite
from opensora_cli.settings.ckpt import MergeLoraSettings


class MergeError(Document):
    """Bound of the difference between unmerged weights and the weights before merging."""

    bound: float | None
    """Largest difference of a weight; None means that there is no bound."""
    tensor: str
    """Tensor with that difference."""


class MergeResult(WrittenDocument):
    """Written file, and the error of unmerging."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.merge-lora/1"

    changed: int
    """Number of tensors that the adapter changes."""
    error: MergeError | None
    """Bound of the error after unmerging."""

    def lines(self) -> list[str]:
        """Return the path of the written file and, after unmerging, the error."""
        written = super().lines()
        if self.error is None:
            return written
        if self.error.bound is None:
            return [*written, f"there is no bound for {self.error.tensor}: it is not finite"]
        return [
            *written,
            f"each of the {self.changed} tensors is as before merging, but for rounding: "
            f"off by at most {self.error.bound:.3g}, in {self.error.tensor}",
        ]


def merge_lora(settings: MergeLoraSettings, *, reporter: Reporter | None = None) -> MergeResult:
    """Write the base model with the adapter added, or subtracted again.

    Raises:
        RequestError: the adapter is of a kind that cannot be merged, or unmerged, or paths contradict each other.
        CheckpointError: base or adapter are missing or broken, or don't fit each other.
        OutputError: the target exists already, is too large for the disk or cannot be written.
    """
    reporter = reporter or SilentReporter()
    base = open_checkpoint(Path(settings.base))
    shapes = {name: entry.shape for name, entry in base.entries.items()}
    adapter = fit_to_model(open_adapter(Path(settings.adapter)), shapes, base.metadata)
    require_finite(adapter.files)
    combine = unmerge if settings.unmerge else merge
    entries = combine(base.entries, adapter, scale=settings.scale)
    product = Product(source=base, entries=entries, metadata=base.metadata, settings=settings)
    check_product(product, sources=[base.path, *base.files, adapter.path])
    error = None
    if settings.unmerge:
        total = sum(base.entries[name].nbytes for name in adapter.updates)
        with freed_at_once(), reporter.stage("measure", total=total, unit=BYTES) as progress:
            bound, tensor = unmerge_error(base.entries, adapter, scale=settings.scale, advance=progress.advance)
        error = MergeError(bound=bound if math.isfinite(bound) else None, tensor=tensor)
    sha256, files = write(product, reporter=reporter)
    changed = len(adapter.updates) + len(adapter.replacements)
    return MergeResult.of(product, source_sha256=sha256, files=files, changed=changed, error=error)
