"""`osora train --check-data` reports on the data of a run, and `--new` writes a recipe that fits a folder.

No model is loaded.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import FileProblem, OutputError, RequestError
from opensora_cli.core.files import atomic_path
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.data.batches import EpochPlan
from opensora_cli.data.buckets import FILLED, NO_BUCKET, Buckets, Samples, frame_intervals
from opensora_cli.data.table import BadRow, BrokenFile, read_table
from opensora_cli.engine.data.scan import scan
from opensora_cli.engine.encode.datasets import UnusedRows, find_unused, make_buckets, open_table, pixel_multiple
from opensora_cli.sampling.sizes import num_pixels, training_sizes
from opensora_cli.settings.layers import EXTENDS, settings_path
from opensora_cli.settings.tools import ScanSettings
from opensora_cli.settings.train import TrainSettings, load_train_settings
from opensora_cli.settings.train_sections import BucketSettings, BucketTable, DataSettings

_MOST_LENGTHS = 6
_LISTED = 20


class BucketReport(Document):
    """Samples of one resolution and length, in all shapes, in the first epoch."""

    resolution: str
    num_frames: int
    probability: float
    batch_size: int
    samples: int
    micro_batches: int

    @property
    def name(self) -> str:
        """Name of the bucket in messages."""
        return f"{self.resolution} x {self.num_frames} frame{'' if self.num_frames == 1 else 's'}"

    def line(self) -> str:
        """Return the bucket for people."""
        batches = f"{self.micro_batches:>9,} micro-batches of {self.batch_size}"
        probability = "" if self.probability == 1 else f", probability {self.probability:g}"
        return f"{self.name:20} {self.samples:>9,} samples {batches}{probability}"


class DataReport(Document):
    """Content of an epoch, and the rows that it cannot use."""

    SCHEMA = "osora.data-check/3"

    source: str
    """Path of the table."""
    rows: int
    bad_rows: tuple[BadRow, ...]
    without_caption: int
    unused: tuple[UnusedRows, ...]
    """Good rows that the first epoch cannot use, by reason."""
    buckets: tuple[BucketReport, ...]
    micro_batches: int
    """Micro-batches of the first epoch."""
    micro_batches_of_update: int
    updates: int
    """Updates of an epoch."""
    problems: tuple[str, ...]
    """Reasons why training on this data is impossible, one line each."""

    def raise_for_problems(self) -> None:
        """Raise FileProblem if a bucket or the epoch is empty."""
        if self.problems:
            raise FileProblem(
                "\n".join(self.problems),
                hint="take empty buckets out of data.buckets, make their batches smaller, or give more data",
            )

    def lines(self) -> list[str]:
        """Return the report for people."""
        more = len(self.bad_rows) - _LISTED
        updates = f"{self.updates:,} updates of {self.micro_batches_of_update}"
        return [
            f"data      {self.source}: {self.rows:,} rows, of which {len(self.bad_rows):,} are bad",
            *(f"bad row   {bad.row}: {bad.path}: {bad.reason}" for bad in self.bad_rows[:_LISTED]),
            *([f"bad row   and {more:,} more"] if more > 0 else []),
            *([f"caption   {self.without_caption:,} rows without one"] if self.without_caption else []),
            *(line for each in self.unused for line in each.lines()),
            *(f"bucket    {bucket.line()}" for bucket in self.buckets),
            f"epoch     {self.micro_batches:,} micro-batches, {updates}",
        ]


def check_data(settings: TrainSettings, *, reporter: Reporter) -> DataReport:
    """Return the content of a run's first epoch. Every file of the table is looked up, and none is read."""

    def look(files: Sequence[Path]) -> Iterator[bool]:
        with reporter.stage("look for files", total=len(files), unit="files") as progress:
            for file in files:
                progress.advance()
                yield os.path.isfile(file)  # the function of pathlib raises for names that are too long

    source = open_table(settings, fixed_starts=True, look=look)
    table, plan = source.table, source.plan_epoch(0)
    of_update = settings.loop.micro_batches or settings.parallel.data_ranks(settings.strategy)
    reports = _bucket_reports(settings.data, source.buckets, plan)
    problems = [
        f"bucket {bucket.name} is empty: {bucket.samples} samples in all shapes fill no micro-batch of "
        f"{bucket.batch_size}"
        for bucket in reports
        if bucket.probability > 0 and bucket.micro_batches == 0
    ]
    if len(plan) < of_update:
        problems.append(f"an epoch is empty: it has {len(plan)} micro-batches, and an update takes {of_update}")
    return DataReport(
        source=str(settings.data.table),
        rows=len(table) + len(table.bad_rows),
        bad_rows=table.bad_rows,
        without_caption=int((table.texts == "").sum()),
        unused=find_unused(source),
        buckets=reports,
        micro_batches=len(plan),
        micro_batches_of_update=of_update,
        updates=len(plan) // of_update,
        problems=tuple(problems),
    )


def _bucket_reports(data: DataSettings, buckets: Buckets, plan: EpochPlan) -> tuple[BucketReport, ...]:
    samples, batches = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for index in range(len(buckets)):
        samples[buckets[index].kind] += int(plan.samples_of_buckets[index])
        batches[buckets[index].kind] += int(plan.batches_of_buckets[index])
    return tuple(
        BucketReport(
            resolution=name,
            num_frames=length,
            probability=bucket.probability,
            batch_size=bucket.batch_size,
            samples=samples[name, length],
            micro_batches=batches[name, length],
        )
        for name, lengths in data.buckets.items()
        for length, bucket in lengths.items()
    )


class NewRecipe(Document):
    """Description of the written recipe."""

    SCHEMA = "osora.new-recipe/4"

    recipe: Path
    table: Path
    data: DataReport
    """Report on the data of the recipe."""
    broken: tuple[BrokenFile, ...] = ()
    """Files of the folder that cannot be read and are not in the table."""

    def lines(self) -> list[str]:
        """Return the recipe and its data for people."""
        return [
            f"recipe    {self.recipe}",
            *self.data.lines(),
            *(f"broken    {file.reason}" for file in self.broken),
            *(f"problem   {problem}" for problem in self.data.problems),
            f"next      osora train --config {self.recipe}",
        ]


def write_recipe(folder: str, base: Path, *, reporter: Reporter | None = None) -> NewRecipe:
    """Write `FOLDER.yaml` beside a folder: the recipe `base` with buckets for all clips of the folder.

    The folder is scanned, unless its table exists. Raises FileProblem if it holds nothing for training, and OutputError
    if the recipe exists.
    """
    recipe = Path(f"{os.path.abspath(folder)}.yaml")
    if os.path.lexists(recipe):
        raise OutputError(
            f"{recipe} exists already", hint=f"use it: osora train --config {_shown(recipe)}; or move it elsewhere"
        )
    if base.suffix == ".py":
        raise RequestError(f"--new takes a recipe of osora as --config, and {base} is a file of the reference")
    settings = load_train_settings(config=base, overrides={}, environment={})
    reporter = reporter or SilentReporter()
    table, broken = recipe.with_suffix(".csv"), tuple[BrokenFile, ...]()
    if os.path.lexists(table):
        reporter.note(f"{_shown(table)} is used unchanged: osora data scan {folder} --overwrite reads the folder again")
    else:
        broken = scan(ScanSettings(folder=folder), reporter=reporter).broken
    buckets, fps_max, unfit = suggest_buckets(read_table(table).samples, settings)
    if not buckets:
        raise FileProblem(f"{folder} has nothing large and long enough to train on", hint="give larger or longer clips")
    text = _recipe_text(settings, buckets, fps_max, unfit, base=base, recipe=recipe)
    with atomic_path(recipe, replace=False) as temporary:
        temporary.write_text(text, encoding="utf-8")
        # Checked before the rename, because a base may have settings that contradict a table.
        written = load_train_settings(config=temporary, overrides={}, environment={})
        data = check_data(written, reporter=reporter)
    return NewRecipe(recipe=_shown(recipe), table=table, data=data, broken=broken)


def suggest_buckets(samples: Samples, settings: TrainSettings) -> tuple[BucketTable, float, int]:
    """Return buckets for all samples that fit the models of `settings`, `data.fps_max`, and the number of samples left.

    The settings give resolution, longest length, frame rate and size of a micro-batch. Shorter videos get additional
    lengths, and smaller videos additional resolutions. A micro-batch is no larger than the number of samples of the
    rarest shape.
    """
    multiple, grid, fps_max = pixel_multiple(settings), settings.vae.grid, settings.data.fps_max
    name, longest = max(
        ((name, max(lengths)) for name, lengths in settings.data.buckets.items()),
        key=lambda kind: (kind[1] > 1, num_pixels(kind[0])),
    )
    side = int(math.sqrt(num_pixels(name)))
    budget = settings.data.buckets[name][longest].batch_size * grid.latent_frames(longest) * num_pixels(name)
    is_video, shortest = samples.num_frames > 1, grid.num_frames(2)
    # The lowest rate, to a thousandth, that leaves enough frames of short, fast videos.
    left = samples.num_frames // frame_intervals(samples.fps, fps_max)
    fast = is_video & (samples.num_frames >= shortest) & (left < shortest)
    if fast.any():
        rate = float((samples.fps[fast] / (samples.num_frames[fast] // shortest)).max())
        fps_max = max(fps_max, math.ceil(rate * 1000 - 1e-6) / 1000)
        left = samples.num_frames // frame_intervals(samples.fps, fps_max)
    lengths = np.array([grid.longest_clip(min(int(each), longest)) for each in left.tolist()], dtype=np.int64)
    lengths = np.where(is_video, lengths, 1)
    sides = _sides(samples, side, multiple=multiple)
    fits = (~is_video | (lengths > 1)) & (sides > 0)
    table: BucketTable = {}
    for each in sorted(set(sides[fits].tolist()), reverse=True):
        wanted = sorted(set(lengths[fits & (sides == each)].tolist()))
        thinned = {round(place) for place in np.linspace(0, len(wanted) - 1, _MOST_LENGTHS)}
        table[f"{each}px"] = {wanted[place]: BucketSettings(1.0, 1) for place in sorted(thinned)}
    if not table:
        return {}, fps_max, len(samples)
    buckets = make_buckets(table, fps_max=fps_max, multiple=multiple)
    placed = buckets.assign(samples, np.zeros((len(samples), len(buckets.resolutions))))
    counts = np.bincount(placed[placed != NO_BUCKET], minlength=len(buckets))
    found: dict[tuple[str, int], list[int]] = {}
    for index in np.flatnonzero(counts).tolist():
        found.setdefault(buckets[index].kind, []).append(int(counts[index]))
    filled: BucketTable = {}
    for (name, length), of_shapes in sorted(found.items(), key=lambda item: (-num_pixels(item[0][0]), -item[0][1])):
        most = int(budget // (grid.latent_frames(length) * num_pixels(name)))
        filled.setdefault(name, {})[length] = BucketSettings(1.0, max(1, min(most, 4096, *of_shapes)))
    return filled, fps_max, int((placed == NO_BUCKET).sum())


def _sides(samples: Samples, usual: int, *, multiple: int) -> NDArray[np.int64]:
    """Return the side of each sample's resolution: the usual side or the largest half, quarter ... that the sample
    fills; 0 for a sample that is too small.
    """
    own = np.sqrt(samples.height * samples.width / FILLED)
    sides, side = np.zeros(len(samples), dtype=np.int64), usual
    while side >= 10:  # the smallest that a resolution can name
        try:
            training_sizes(f"{side}px", multiple=multiple)
        except RequestError:
            break
        sides[(sides == 0) & (own >= side)] = side
        side //= 2
    return sides


def _recipe_text(
    settings: TrainSettings, buckets: BucketTable, fps_max: float, unfit: int, *, base: Path, recipe: Path
) -> str:
    name, source = recipe.stem, settings_path(base, "train")
    plain = {name: {n: list(bucket) for n, bucket in rest.items()} for name, rest in buckets.items()}
    values: dict[str, object] = {
        EXTENDS: f"train/{base}" if source != base else os.path.abspath(base),
        "output": f"runs/{name}",
        "data": {
            "table": str(_shown(recipe.with_suffix(".csv"))),
            "fps_max": fps_max,
            # Buckets as text replace all of the base.
            "buckets": yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6).strip(),
        },
    }
    if settings.trains_transformer and (changes := _transformer_values(settings, buckets, name=name)):
        values["train_mmdit"] = changes
    lines = [
        f"# Clips of {name}, made by `osora train --new`: {base} with buckets that take in all of them.",
        f"# osora train --config {_shown(recipe)}",
        "# Buckets: resolution, frames, [probability, clips of a micro-batch, at most those of the rarest shape].",
        *([f"# Skipped, too small or too short for any bucket: {unfit:,}."] if unfit else []),
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10**6)


def _transformer_values(settings: TrainSettings, buckets: BucketTable, *, name: str) -> dict[str, object]:
    """Return a cache of its own, and no weight for condition modes that no clip is long enough for."""
    chosen, grid = settings.train_mmdit, settings.vae.grid
    most = max(grid.latent_frames(length) for lengths in buckets.values() for length in lengths)
    weights = {
        mode: 0
        for mode in chosen.mode_weights.by_mode()
        if chosen.lengths.given_latent_frames(CONDITION_MODES[mode], causal=grid.is_causal) >= most
    }
    if weights and not chosen.mode_weights.by_mode().keys() - weights.keys():
        weights["t2v"] = 1
    values: dict[str, object] = {} if chosen.cache is None else {"cache": f"runs/{name}_cache"}
    return {**values, "mode_weights": weights} if weights else values


def _shown(path: Path) -> Path:
    """Return a path relative to the current folder, if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
