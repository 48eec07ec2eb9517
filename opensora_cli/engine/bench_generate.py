"""`osora bench-generate`: the same video made with other settings, each compared with the exact run."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import ClassVar

from opensora_cli.core.device import peak_memory_gib, start_peak_memory
from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.formatting import aligned_rows
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.generate import ranks as generate_ranks
from opensora_cli.engine.generate.chain import Chain, require_runnable
from opensora_cli.engine.generate.decode import Clip, hold
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.pipeline import computing, make
from opensora_cli.engine.generate.plan import VIDEO, Plan
from opensora_cli.engine.generate.ranks import ALONE
from opensora_cli.engine.generate.references import Reference, references_of
from opensora_cli.engine.generate.refinement import refined
from opensora_cli.engine.generate.run import plan_here
from opensora_cli.engine.generate.sample import Sample
from opensora_cli.engine.launch.rank import WatchedReporter
from opensora_cli.media.similarity import SSIM_WINDOW, psnr_db, ssim
from opensora_cli.memory.monitor import Spread
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.tries import EXACT, STANDARD, Tries, tried_settings

_SMALL_ERROR = 1e-3
_NOTHING_KEPT: Mapping[str, object] = {
    "output.save_state_every": None,
    "output.preview_every": None,
    "output.save_latents": False,
    "picture.save": False,
}
_WARM_UP_STEPS = 2
_Made = tuple[Clip | None, dict[str, float], list[float]]


class BenchedSetting(Document):
    """One row of the table: the exact run, or the same video made with other settings."""

    name: str
    """`exact`, a name of the standard set, or the settings in the user's form."""
    changes: Mapping[str, str]
    """Settings that differ from the exact run, by key."""
    stages_s: Mapping[str, float]
    """Mean time of each stage. Stages that load or offload models are listed here, and are not part of `seconds`."""
    seconds: float
    """Mean time of a run without loading."""
    deviation_s: float
    """Standard deviation of `seconds` over the runs (n-1); 0 for a single run."""
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

    SCHEMA: ClassVar[str | None] = "osora.bench-generate/3"

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
        stages = list(dict.fromkeys(name for row in self.settings for name in row.stages_s if not is_loading(name)))
        times = [["setting", *(f"{name} s" for name in [*stages, "total"])]]
        measures = [["setting", "evaluations", "speed-up", "peak GiB", "PSNR dB", "SSIM", "latents"]]
        for row in self.settings:
            means = (f"{row.stages_s[name]:.2f}" if name in row.stages_s else "-" for name in stages)
            total = f"{row.seconds:.2f}" + (f" ±{row.deviation_s:.2f}" if self.repeats > 1 else "")
            times.append([row.name, *means, total])
            values = row.peak_memory_gib, row.psnr_db, row.ssim, row.latents_error
            forms = ".2f", ".2f", ".4f", ".2%" if (row.latents_error or 1) >= _SMALL_ERROR else ".1e"
            shown = ("-" if value is None else f"{value:{form}}" for value, form in zip(values, forms, strict=True))
            measures.append([row.name, str(row.evaluations), f"{row.speedup:.2f}", *shown])
        on = f"{self.device} ({self.device_name})" + (f", {self.ranks} ranks" if self.ranks > 1 else "")
        return [
            f"compared    {self.of}, seed {self.seed}, on {on}",
            *aligned_rows(times),
            "",
            *aligned_rows(measures),
            *(f"skipped     {name}: {why}" for name, why in self.skipped.items()),
        ]


def is_loading(stage: str) -> bool:
    """Return whether a stage loads or offloads models, which a program that makes many videos does once."""
    return stage.split()[-1] in ("load", "offload")


def bench_generate(
    settings: GenerateSettings,
    tries: Tries,
    *,
    repeats: int,
    reporter: Reporter,
    context: RankContext | None = None,
    rank_flags: Sequence[str] = (),
) -> BenchGenerateReport | None:
    """Make the video of `settings`, the exact run, and the same video with each of `tries`; return their measurements.

    No video is kept. Everything is planned before the first run. A few steps warm up before the first run, and before
    settings that differ in more than sampling. For several devices, ranks are started, and rank 0 prints the report.

    Args:
        tries: changed settings by name. None means the standard set, without settings that the request does not allow
            or that need no fewer evaluations.
        repeats: number of timed runs of each row.
        context: set in one of several ranks, which all call this; only rank 0 gets a report.
        rank_flags: options of the command line for ranks that are started here.
    """
    if context is None and settings.parallel.world_size > 1:
        generate_ranks.require_devices(settings)
        generate_ranks.start_ranks(refined(settings, reporter=reporter), "bench-generate", rank_flags)
        return None
    settings = settings.replace(_NOTHING_KEPT)
    with ExitStack() as stack:
        ranks = ALONE
        if context is not None:
            reporter = WatchedReporter(reporter)
            settings, ranks = stack.enter_context(generate_ranks.joined_ranks(settings, context, reporter))
        models = stack.enter_context(LoadedModels(stay=True, ranks=ranks))
        chain = plan_here(settings, models, reporter=reporter)
        rows, skipped = _planned(chain, tries, models, reporter)
        exact = rows[0].chain.video
        is_main = context is None or context.is_main
        references = references_of(exact, reporter) if is_main else []
        _run_all(rows, repeats, partial(_make, models=models, references=references, reporter=reporter), reporter)
    if not is_main:
        return None
    return BenchGenerateReport(
        of=exact.summary,
        prompt=exact.settings.prompt,
        seed=exact.settings.sampling.seed,
        device=str(exact.hardware.device),
        device_name=exact.hardware.device_name,
        ranks=exact.mesh.size,
        repeats=repeats,
        settings=tuple(row.document(rows[0]) for row in rows),
        skipped=skipped,
    )


@dataclass(slots=True)
class _Row:
    name: str
    changes: Mapping[str, object]
    chain: Chain
    stages_s: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds of each stage in each timed run."""
    peaks_gib: list[float] = field(default_factory=list)
    likeness: tuple[float | None, float | None, float | None] = (None, None, None)

    @property
    def seconds(self) -> list[float]:
        return [sum(seconds for name, seconds in run.items() if not is_loading(name)) for run in self.stages_s]

    def document(self, exact: "_Row") -> BenchedSetting:
        psnr, similarity, latents_error = self.likeness
        time = Spread.of(self.seconds)
        return BenchedSetting(
            name=self.name,
            changes={key: "none" if value is None else str(value) for key, value in self.changes.items()},
            stages_s={name: round(fmean(run.get(name, 0.0) for run in self.stages_s), 4) for name in self.stages_s[0]},
            seconds=round(time.mean_s, 4),
            deviation_s=round(time.deviation_s, 4),
            evaluations=self.chain.model_evaluations,
            speedup=fmean(exact.seconds) / time.mean_s,
            peak_memory_gib=max(self.peaks_gib, default=None),
            psnr_db=psnr,
            ssim=similarity,
            latents_error=latents_error,
        )


def _planned(exact: Chain, tries: Tries, models: LoadedModels, reporter: Reporter) -> tuple[list[_Row], dict[str, str]]:
    """Return a row for each setting, the exact run first, and the reason for each skipped name of the standard set."""
    require_runnable(exact, reporter)
    rows, skipped = [_Row(EXACT, {}, exact)], {}
    for name, changes in (STANDARD if tries is None else tries).items():
        try:
            # Sums depend on the number of threads: all rows use the number of the exact run.
            changed, silent = tried_settings(exact.settings, changes, name=name), SilentReporter()
            chain = plan_here(changed, models, reporter=silent)
            require_runnable(chain, silent)
        except OsoraError as error:
            if tries is not None:
                raise
            skipped[name] = error.message.replace("\n", "; ")
            continue
        if tries is None and chain.model_evaluations >= exact.model_evaluations:
            skipped[name] = f"{chain.model_evaluations} evaluations; the exact run takes {exact.model_evaluations}"
        else:
            rows.append(_Row(name, changes, chain))
    return rows, skipped


def _with_few_steps(plan: Plan) -> Plan:
    return replace(plan, timesteps=plan.timesteps[: plan.start + _WARM_UP_STEPS + 1])


def _run_all(rows: Sequence[_Row], repeats: int, make_video: Callable[[Chain], _Made], reporter: Reporter) -> None:
    """Run all rows `repeats` times, back and forth, so that a machine that slows down favors no row."""
    exact, warm, done = None, set(), 0
    turns = [row for turn in range(repeats) for row in (rows if turn % 2 == 0 else reversed(rows))]
    try:
        for row in turns:
            place = f"run {done + 1} of {len(turns)}: {row.name}"
            # Runs that differ in sampling alone use the same kernels.
            kernels = json.dumps(row.chain.settings.model_dump(mode="json", exclude={"sampling"}), sort_keys=True)
            if kernels not in warm:
                reporter.note(f"{place}, a few steps to warm up")
                make_video(row.chain.change(_with_few_steps))
                warm.add(kernels)
            video, stages_s, peaks_gib = make_video(row.chain)
            row.stages_s.append(stages_s)
            row.peaks_gib += peaks_gib
            done += 1
            reporter.note(f"{place}: {row.seconds[-1]:.2f} s")
            if video is not None and exact is not None and row.likeness[0] is None:
                # The second exact run is compared with the first: their difference is the noise of this device.
                with reporter.stage("compare", total=len(video.frames_THWC), unit="frames") as progress:
                    row.likeness = likeness(video, exact, on_frame=progress.advance)
            exact = exact or video
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"{done} of {len(turns)} runs were finished; there is no table") from interrupt


def likeness(video: Clip, exact: Clip, *, on_frame: Callable[[], None]) -> tuple[float, float | None, float]:
    """Return PSNR, SSIM (None for frames under 11 pixels) and relative error of the latents, to the exact video."""
    psnrs, ssims = [], []
    for frame_HWC, exact_HWC in zip(video.frames_THWC, exact.frames_THWC, strict=True):
        psnrs.append(psnr_db(frame_HWC, exact_HWC))
        if min(frame_HWC.shape[:2]) >= SSIM_WINDOW:
            ssims.append(ssim(frame_HWC, exact_HWC))
        on_frame()
    difference = norm = 0.0
    for ours, theirs in zip(video.latents, exact.latents, strict=True):
        difference += float((ours.double() - theirs.double()).square().sum())
        norm += float(theirs.double().square().sum())
    error = math.sqrt(difference / norm) if norm else math.sqrt(difference)
    return round(fmean(psnrs), 3), round(fmean(ssims), 5) if ssims else None, error


def _make(chain: Chain, *, models: LoadedModels, references: Sequence[Reference], reporter: Reporter) -> _Made:
    """Make a video; return it on rank 0, the seconds of its stages, and the peak memory of each rank in GiB."""
    events, device = Events(reporter), chain.video.hardware.device
    models.prompts.clear()  # Each run encodes its prompts.
    chain = chain.change(models.planned, only=VIDEO)
    sample = Sample(chain, chain.video, sample_files(chain.settings, 0), references)
    with computing(chain.video, reporter):
        is_measured = start_peak_memory(device)
        videos = make(chain, [sample], models, events, finish=hold)
        peaks = [*peak_memory_gib(device).values()] if is_measured else []
    if models.ranks.count > 1:
        peaks = [peak for of_rank in all_gather_json(peaks) for peak in of_rank]
    return (videos[0] if videos else None), events.timings_s, peaks
