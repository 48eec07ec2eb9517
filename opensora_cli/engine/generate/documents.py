"""Results of `osora generate`, as documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import BatchError
from opensora_cli.core.threads import ThreadChoice
from opensora_cli.engine.components.attention import AttentionPlan
from opensora_cli.engine.components.linear_products import LinearProductsReport
from opensora_cli.engine.generate.decode import GeneratedVideo
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA

_LISTED_ROWS = 20


class ExploredSeed(Document):
    """A sample that was begun, to choose from."""

    seed: int
    state: Path
    """Latents to go on from."""
    steps: int | None
    """Steps that the latents have been through; None for all steps."""
    preview: Path | None
    """An animation of what was predicted last; None: there is none."""
    command: str = Field(exclude=True)
    """Command that finishes the sample."""

    def line(self) -> str:
        """Return the command that finishes it, with its seed."""
        return f"{self.command}  # seed {self.seed}"


class GenerateResult(Document):
    """Results of a run, with its settings and timings; `--from` makes them again from this document."""

    SCHEMA = SIDECAR_SCHEMA

    videos: tuple[GeneratedVideo, ...] = Field(serialization_alias="outputs")
    explored: tuple[ExploredSeed, ...] | None = None
    """Left out where no seeds were explored."""
    sheet: Path | None = None
    """With a preview of each of them; left out where there is none."""
    model: ModelName
    device: str
    model_evaluations: int
    """Evaluations of the model for all samples."""
    timings_s: dict[str, float]
    """Seconds of each stage."""
    threads: ThreadChoice | None = None
    """Threads that computed on the CPU, also in the settings of a run on a CPU; absent if nothing was computed."""
    peak_allocated_gib: float | None = None
    """The most memory in use on a CUDA device; left out on a CPU."""
    peak_resident_gib: float | None = None
    """The most memory of the process, mapped files of weights included; left out on a CUDA device."""
    attention: AttentionPlan | None = None
    """Attention backend of the transformer, with the reason; absent if saved latents were decoded."""
    linear_products: LinearProductsReport | None = None
    """Errors of 8-bit products; absent if there were none."""
    settings: GenerateSettings

    def to_json(self) -> dict[str, Any]:
        """Return the document, without what was not measured or did not run, and settings that took no part."""
        document = {key: value for key, value in super().to_json().items() if value is not None}
        return {**document, "settings": used_settings(self.settings)}

    def lines(self) -> list[str]:
        """Return the path of every result, and the command that finishes each explored seed."""
        return [
            *(str(path) for path in (*(video.path for video in self.videos), self.sheet) if path is not None),
            *(seed.line() for seed in self.explored or ()),
        ]


class FailedRow(Document):
    """A row that was not made."""

    row: int
    """From 1."""
    prompt: str
    error: str


class BatchResult(Document):
    """Results of a run over many prompts."""

    SCHEMA = "osora.batch/2"

    rows: int
    """Requested rows; for a shard, the rows of the shard."""
    made: int
    kept: int
    """Finished before."""
    failed: tuple[FailedRow, ...]
    outputs: tuple[Path, ...]
    """Results of all finished rows, in the order of the rows."""

    def lines(self) -> list[str]:
        """Return the path of every result."""
        return [str(path) for path in self.outputs]

    def require_whole(self) -> None:
        """Raise BatchError if rows failed."""
        if self.failed:
            others = "the others are finished; " if self.outputs else ""
            raise BatchError(
                "\n".join([f"{len(self.failed)} of {self.rows} rows failed", *failed_lines(self.failed)]),
                hint=f"{others}--json lists all, and the same command tries these again",
            )


def failed_lines(failed: Sequence[FailedRow]) -> list[str]:
    lines = [f"row {each.row}: {each.error}" for each in failed[:_LISTED_ROWS]]
    return lines if len(failed) <= _LISTED_ROWS else [*lines, f"and {len(failed) - _LISTED_ROWS} more"]
