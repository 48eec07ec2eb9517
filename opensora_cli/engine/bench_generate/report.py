"""What was compared: a document, a table and a chart."""

from collections.abc import Mapping
from typing import ClassVar

from opensora_cli.core.documents import Document
from opensora_cli.media.plots import new_figure, write_figure
from opensora_cli.media.similarity import HIGHEST_PSNR_DB

_NAME_COLUMN = 12
_LONGEST_NAME = 48
_PER_CENT = 1e-3
_NOISE = 0.05
"""Of the speed-up, from which on it is mentioned."""


class BenchedSetting(Document):
    """One row: the exact run, or what was tried beside it."""

    name: str
    """`exact`, a name of the standard set, or the settings as they were typed."""
    changes: Mapping[str, str]
    """By key, what differs from the exact run."""
    ran: Mapping[str, str]
    """What it was computed with: attention, dtype, offload and the like."""
    runs: int
    """That were timed."""
    stages_s: Mapping[str, float]
    """Seconds of each stage, the median over the runs."""
    loading_s: float
    """Of them, those of loading and offloading models, which do not count."""
    seconds: float
    """Of a run, without loading: the median."""
    spread_s: float
    """Between the fastest run and the slowest."""
    evaluations: int
    """Of the model, counted."""
    speedup: float
    """Seconds of the exact run over these."""
    peak_memory_gib: float | None
    """At most, over runs and ranks: allocated on a GPU, resident on a CPU; None where it cannot be watched."""
    psnr_db: float | None
    """To the exact run's video, over RGB, mean over frames, 99 where they are the same; None: it is that."""
    ssim: float | None
    """Likewise, of the luma."""
    latents_error: float | None
    """Norm of the difference of the latents over that of the exact run's."""
    without_effect: str | None
    """Why it changed nothing: neither a bit, nor the evaluations, nor what computed them; None: it took effect."""


class BenchGenerateReport(Document):
    """A whole comparison; the first of its settings is the exact run."""

    SCHEMA: ClassVar[str | None] = "osora.bench-generate/1"

    of: str
    """What was made."""
    prompt: str
    seed: int
    device: str
    device_name: str
    ranks: int
    repeats: int
    """That were asked for."""
    settings: tuple[BenchedSetting, ...]
    left_out: Mapping[str, str]
    """Of the standard set what was not run, and why."""
    exact_error: float
    """Between latents of two exact runs, as `latents_error`: 0 where they are the same, or there was one alone."""
    is_whole: bool
    """Whether all that was asked for was run."""
    notes: tuple[str, ...]
    files: Mapping[str, str]
    """What was written: kind -> path."""

    def lines(self) -> list[str]:
        """Return it for people: a table."""
        on = f"{self.device} ({self.device_name})" + (f", {self.ranks} ranks" if self.ranks > 1 else "")
        found = [f"compared    {self.of}, seed {self.seed}, on {on}", *self._table(), ""]
        for row in self.settings:
            if row.without_effect is not None:
                found.append(f"{row.name}: without effect: {row.without_effect}")
        noise = max((abs(row.speedup - 1) for row in self.settings if row.without_effect), default=0.0)
        if noise > _NOISE:
            found.append(
                f"note        a setting without effect differs by {noise:.0%} in speed: so much is noise; --repeats "
                "N takes medians"
            )
        found += [f"left out    {name}: {why}" for name, why in self.left_out.items()]
        found += [f"note        {note}" for note in self.notes]
        return [*found, *(f"wrote       {path}" for path in self.files.values())]

    def _table(self) -> list[str]:
        stages = list(dict.fromkeys(name for row in self.settings for name in row.stages_s if not is_loading(name)))
        width = max([_NAME_COLUMN, *(len(_short(row.name)) for row in self.settings)])
        columns = [
            *(f"{name} s" for name in stages),
            "evaluations",
            "speed-up",
            "peak GiB",
            "PSNR dB",
            "SSIM",
            "latents",
        ]
        sizes = [max(9, len(title)) + 2 for title in columns]
        found = [f"{'setting':{width}}" + "".join(f"{t:>{n}}" for t, n in zip(columns, sizes, strict=True))]
        for row in self.settings:
            cells = [
                *(f"{row.stages_s.get(name, 0.0):.2f}" for name in stages),
                str(row.evaluations),
                f"{row.speedup:.2f}",
                _shown(row.peak_memory_gib, ".2f"),
                _shown(row.psnr_db, ".2f"),
                _shown(row.ssim, ".4f"),
                _shown(row.latents_error, ".2%" if (row.latents_error or 1) >= _PER_CENT else ".1e"),
            ]
            line = "".join(f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))
            found.append(f"{_short(row.name):{width}}{line}" + ("   without effect" if row.without_effect else ""))
        return found

    def write_plot(self, path: str, *, replace: bool) -> None:
        """Write a chart of PSNR over evaluations, the exact run a line.
        Raises OutputError if it cannot be written, or exists and must not be replaced.
        """
        figure = new_figure()
        axes = figure.subplots()
        exact, *tried = self.settings
        axes.axvline(exact.evaluations, linestyle="--", color="gray", label="exact")
        for row in tried:
            if row.psnr_db is not None and row.without_effect is None:
                same = ", the same frames" if row.psnr_db >= HIGHEST_PSNR_DB else ""
                label = f"{_short(row.name)} ({row.speedup:.2f} times as fast{same})"
                # Two dollar signs in a name would begin a formula, and a leading _ hides it.
                label = label.replace("$", r"\$").lstrip("_")
                axes.plot([row.evaluations], [row.psnr_db], marker="o", linestyle="none", label=label)
        axes.set_title(f"{self.of}: PSNR to the exact run", parse_math=False)
        axes.set_xlabel("evaluations of the model")
        axes.set_ylabel("PSNR to the exact run (dB)")
        axes.set_xlim(left=0)
        axes.grid(visible=True, alpha=0.3)
        figure.legend(loc="outside lower center")
        write_figure(figure, path, replace=replace)


def is_loading(stage: str) -> bool:
    """Return whether a stage loads or offloads models: done once in a program that makes many videos."""
    return stage.split()[-1] in ("load", "offload")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
