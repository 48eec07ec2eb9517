"""`osora ckpt merge-lora`: an adapter added to the weights that it was trained for, or taken out again."""

import math
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.checkpoint.formats.peft import open_adapter
from opensora_cli.checkpoint.lora import UnmergeError, merge, unmerge, unmerge_error
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.progress import BYTES, Reporter, SilentReporter
from opensora_cli.engine.ckpt.output import Product, Written, check_paths, check_product, write
from opensora_cli.settings.ckpt import MergeLoraSettings

SCHEMA = "osora.ckpt.merge-lora/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What was written."""

    written: Written
    changed: int
    """Tensors that the adapter changes."""
    error: UnmergeError | None
    """After unmerging: how far from the weights before merging they can be."""

    def to_json(self) -> dict[str, object]:
        """Return it as a document of the schema `osora.ckpt.merge-lora/1`.

        `error` is null after merging; after unmerging its `bound` is null if there is none.
        """
        error = None
        if self.error is not None:
            bound = self.error.bound if math.isfinite(self.error.bound) else None
            error = {"bound": bound, "tensor": self.error.tensor}
        return {"schema": SCHEMA, **self.written.to_json(), "changed": self.changed, "error": error}

    def lines(self) -> list[str]:
        """Return the path of what was written and, after unmerging, how exact it is."""
        if self.error is None:
            return self.written.lines()
        if not math.isfinite(self.error.bound):
            return [*self.written.lines(), f"nothing can be said of {self.error.tensor}: it is not finite"]
        return [
            *self.written.lines(),
            f"each of the {self.changed} tensors is as before merging, but for rounding: "
            f"off by at most {self.error.bound:.3g}, in {self.error.tensor}",
        ]


def merge_lora(settings: MergeLoraSettings, *, reporter: Reporter | None = None) -> MergeResult:
    """Write the base model with the adapter in it, or without it again.

    Args:
        settings: what, and where to.
        reporter: shown progress; None: nobody.

    Raises:
        RequestError: the adapter is of a kind that cannot be merged, or unmerged, or paths contradict each other.
        CheckpointError: base or adapter are missing or broken, or don't fit each other.
        OutputError: the target exists already, is too large for the disk or cannot be written.
    """
    reporter = reporter or SilentReporter()
    base = open_checkpoint(Path(settings.base))
    adapter = open_adapter(Path(settings.adapter))
    check_paths([base.path, *base.files, adapter.path], settings)
    combine = unmerge if settings.unmerge else merge
    entries = combine(base.entries, adapter, scale=settings.scale)
    product = Product(source=base, entries=entries, metadata=base.metadata, options=settings.options, settings=settings)
    check_product(product)
    error = None
    if settings.unmerge:
        total = sum(base.entries[name].nbytes for name in adapter.updates)
        with reporter.stage("measure", total=total, unit=BYTES) as progress:
            error = unmerge_error(base.entries, adapter, scale=settings.scale, advance=progress.advance)
    written = write(product, reporter=reporter)
    return MergeResult(written=written, changed=len(adapter.updates) + len(adapter.replacements), error=error)
