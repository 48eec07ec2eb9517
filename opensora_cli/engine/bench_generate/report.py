"""Result of `bench-generate`: a document and a table."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from opensora_cli.core.documents import Document
from opensora_cli.memory.monitor import Spread

_SMALL_ERROR = 1e-3


class RunTime(Document):
    """Seconds over all timed runs of a setting."""

    mean: float
    deviation: float
    """Standard deviation of a sample (n-1); 0 for a single run."""

    @classmethod
    def over(cls, seconds: Sequence[float]) -> "RunTime":
        """Return the mean and the deviation of at least one run."""
        spread = Spread.of(seconds)
        return cls(mean=round(spread.mean_s, 4), deviation=round(spread.deviation_s, 4))


class BenchedSetting(Document):
    """One row of the table: the exact run, or the same video made with other settings."""

    name: str
    """`exact`, a name of the standard set, or the settings in the user's form."""
    changes: Mapping[str, str]
    """Settings that differ from the exact run, by key."""
    stages_s: Mapping[str, RunTime]
    """Time of each stage. The stages that load or offload models are listed here, and are not part of `seconds`."""
    seconds: RunTime
    """Time of a run without loading."""
    evaluations: int
    """Evaluations of the model."""
    speedup: float
    """Mean time of the exact run divided by the mean time of this setting."""
    peak_memory_gib: float | None
    """Highest memory over runs and ranks: allocated on a GPU, resident on a CPU. None if not measurable."""
    psnr_db: float | None
    """PSNR to the first exact run over RGB, mean over frames; 99 for identical frames. None for an exact run that was
    not repeated."""
    ssim: float | None
    """SSIM of the luma, mean over frames. None if `psnr_db` is None, and for frames under 11 pixels."""
    latents_error: float | None
    """Relative L2 error of the latents to the first exact run."""


class BenchGenerateReport(Document):
    """A comparison. The first setting is the exact run."""

    SCHEMA: ClassVar[str | None] = "osora.bench-generate/2"

    of: str
    """Size, length, model and steps of the video."""
    prompt: str
    seed: int
    device: str
    device_name: str
    ranks: int
    repeats: int
    """Timed runs of each setting."""
    settings: tuple[BenchedSetting, ...]
    skipped: Mapping[str, str]
    """Names of the standard set that were not run, with the reason."""

    def lines(self) -> list[str]:
        """Return a table of times and one of results as text, with the deviation of the total if runs were repeated."""
        on = f"{self.device} ({self.device_name})" + (f", {self.ranks} ranks" if self.ranks > 1 else "")
        return [
            f"compared    {self.of}, seed {self.seed}, on {on}",
            *self._times(),
            "",
            *self._measures(),
            *(f"skipped     {name}: {why}" for name, why in self.skipped.items()),
        ]

    def _times(self) -> list[str]:
        stages = list(dict.fromkeys(name for row in self.settings for name in row.stages_s if not is_loading(name)))
        table = [["setting", *(f"{name} s" for name in [*stages, "total"])]]
        for row in self.settings:
            total = f"{row.seconds.mean:.2f}" + (f" ±{row.seconds.deviation:.2f}" if self.repeats > 1 else "")
            means = (f"{row.stages_s[name].mean:.2f}" if name in row.stages_s else "-" for name in stages)
            table.append([row.name, *means, total])
        return _aligned(table)

    def _measures(self) -> list[str]:
        table = [["setting", "evaluations", "speed-up", "peak GiB", "PSNR dB", "SSIM", "latents"]]
        for row in self.settings:
            cells = [
                str(row.evaluations),
                f"{row.speedup:.2f}",
                _number(row.peak_memory_gib, ".2f"),
                _number(row.psnr_db, ".2f"),
                _number(row.ssim, ".4f"),
                _number(row.latents_error, ".2%" if (row.latents_error or 1) >= _SMALL_ERROR else ".1e"),
            ]
            table.append([row.name, *cells])
        return _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines, with names on the left and numbers on the right."""
    name_width, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    return [
        name.ljust(name_width) + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in table
    ]


def is_loading(stage: str) -> bool:
    """Return whether a stage loads or offloads models, which a program that makes many videos does once."""
    return stage.split()[-1] in ("load", "offload")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
