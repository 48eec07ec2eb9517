"""`osora ckpt merge-lora`: add an adapter to the weights of its base model, or subtract it again."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from opensora_cli.checkpoint.formats.lora_file import open_adapter
from opensora_cli.checkpoint.lora import merge
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.ckpt.convert import Derived, write_derived
from opensora_cli.engine.components.lora_files import fit_to_model, require_finite
from opensora_cli.settings.ckpt import MergeLoraSettings


class Merge(Derived):
    """Weights with an adapter added or subtracted."""

    SCHEMA: ClassVar[str | None] = "osora.ckpt.merge-lora/2"

    changed: int
    """Number of tensors that the adapter changes."""
    rounded_to: tuple[str, ...] = Field(exclude=True)
    """Dtypes of the tensors from which the adapter was subtracted."""

    def lines(self) -> list[str]:
        """Return the path of the written file and, after unmerging, how exact it is."""
        exactness = f"{self.changed} tensors are as before merging, up to rounding to {' and '.join(self.rounded_to)}"
        return [*super().lines(), *([exactness] if self.rounded_to else [])]


def merge_lora(settings: MergeLoraSettings, *, reporter: Reporter | None = None) -> Merge:
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
    reporter.note(f"adapter {adapter.path}: {adapter.scales}, times --scale {settings.scale:g}")
    entries = merge(base.entries, adapter, scale=settings.scale, subtract=settings.unmerge)
    dtypes = {str(entries[name].dtype).removeprefix("torch.") for name in adapter.updates}
    return write_derived(
        Merge,
        settings,
        base,
        entries,
        base.metadata,
        reporter=reporter,
        more_sources=[adapter.path],
        changed=len(adapter.updates),
        rounded_to=tuple(sorted(dtypes)) if settings.unmerge else (),
    )
