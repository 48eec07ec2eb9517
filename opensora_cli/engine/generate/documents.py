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
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA

_LISTED_ROWS = 20


class ExploredSeed(Document):
    """Sample that `--explore` started."""

    seed: int
    state: Path
    """Latents to continue from."""
    steps: int | None
    """Steps done; None means all steps."""
    preview: Path | None
    """Animation of the last prediction; None without previews."""
    command: str = Field(exclude=True)
    """Command that finishes the sample."""

    def line(self) -> str:
        """Return the command that finishes the sample, with its seed."""
        return f"{self.command}  # seed {self.seed}"


class GenerateResult(Document):
    """Results of a run with settings and timings. `--from` makes the results again."""

    SCHEMA = SIDECAR_SCHEMA

    videos: tuple[GeneratedVideo, ...] = Field(serialization_alias="outputs")
    explored: tuple[ExploredSeed, ...] | None = None
    """Explored seeds; absent without `--explore`."""
    sheet: Path | None = None
    """Sheet with a preview of each explored seed; absent without one."""
    model: str
    device: str
    model_evaluations: int
    """Model evaluations for all samples."""
    timings_s: dict[str, float]
    """Seconds of each stage."""
    threads: ThreadChoice | None = None
    """CPU threads; absent if nothing was computed."""
    peak_allocated_gib: float | None = None
    """Peak memory of a CUDA device; absent on a CPU."""
    peak_resident_gib: float | None = None
    """Peak memory of the process, with mapped files of weights; absent on a CUDA device."""
    attention: AttentionPlan | None = None
    """Attention backend of the transformer, with the reason; absent if saved latents were decoded."""
    linear_products: LinearProductsReport | None = None
    """Errors of 8-bit products; absent without them."""
    settings: GenerateSettings

    def to_json(self) -> dict[str, Any]:
        """Return the document without empty keys, and without settings that had no effect."""
        document = {key: value for key, value in super().to_json().items() if value is not None}
        return {**document, "settings": used_settings(self.settings)}

    def lines(self) -> list[str]:
        """Return the path of every result, and the command that finishes each explored seed."""
        return [
            *(str(path) for path in (*(video.path for video in self.videos), self.sheet) if path is not None),
            *(seed.line() for seed in self.explored or ()),
        ]


class FailedRow(Document):
    """Row that failed."""

    row: int
    """Number of the row, from 1."""
    prompt: str
    error: str


class BatchResult(Document):
    """Results of a run over many prompts."""

    SCHEMA = "osora.batch/2"

    rows: int
    """Number of requested rows, of the shard if there is one."""
    made: int
    kept: int
    """Number of rows that an earlier run finished."""
    failed: tuple[FailedRow, ...]
    outputs: tuple[Path, ...]
    """Results of all finished rows, in the order of the file."""

    def lines(self) -> list[str]:
        """Return the path of every result."""
        return [str(path) for path in self.outputs]

    def raise_for_problems(self) -> None:
        """Raise BatchError if rows failed."""
        if self.failed:
            others = "the others are finished; " if self.outputs else ""
            raise BatchError(
                "\n".join([f"{len(self.failed)} of {self.rows} rows failed", *failed_lines(self.failed)]),
                hint=f"{others}--json lists all, and the same command tries these again",
            )


def failed_lines(failed: Sequence[FailedRow]) -> list[str]:
    """Return a line for each of the first failed rows, and one with the number of the others."""
    lines = [f"row {each.row}: {each.error}" for each in failed[:_LISTED_ROWS]]
    return lines if len(failed) <= _LISTED_ROWS else [*lines, f"and {len(failed) - _LISTED_ROWS} more"]
