"""`osora bench-generate`: the same video with other settings, each beside the exact run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from pydantic import ValidationError

from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.files import require_writable
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.signals import held_back
from opensora_cli.engine.bench_generate.effect import what_ran, why_without_effect
from opensora_cli.engine.bench_generate.likeness import Likeness, latents_error, likeness
from opensora_cli.engine.bench_generate.measure import Figures, Video, kernels_of, run_once, warmed
from opensora_cli.engine.bench_generate.report import BenchedSetting, BenchGenerateReport, is_loading
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.make import require_room, require_weights
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.ranks import (
    Ranks,
    joined_to_generate,
    plan_of_rank,
    request_of_rank,
    require_devices,
    start_ranks,
)
from opensora_cli.engine.generate.references import references_of
from opensora_cli.engine.generate.refinement import refined
from opensora_cli.engine.generate.resolve import completed, refuse_data_parallel, resolve_generate_settings
from opensora_cli.engine.generate.room import require_fit
from opensora_cli.engine.generate.run import Run, watched
from opensora_cli.media.plots import new_figure
from opensora_cli.settings.bench_generate import (
    EXACT,
    STANDARD,
    BenchGenerateSettings,
    Changes,
    refuse_unfit,
    tried_settings,
)
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest
from opensora_cli.settings.used import idle_guidance

Publish = Callable[[BenchGenerateReport], None]

_NOTHING_KEPT: Mapping[str, object] = {
    # What is timed is done.
    "runtime.prompt_cache": False,
    "picture.save": False,
    "output.save_state_every": None,
    "output.preview_every": None,
    "output.save_latents": False,
}


def bench_from_request(
    request: GenerateRequest,
    tries: Mapping[str, Changes],
    options: BenchGenerateSettings,
    *,
    reporter: Reporter,
    context: RankContext | None = None,
    rank_flags: Sequence[str] = (),
    publish: Publish,
) -> None:
    """Choose the model, complete the settings and compare, with several devices in processes of their own.

    `context` is set in one of several ranks, and `rank_flags` are passed on to ranks that are started here, of which
    the first publishes. Other arguments and errors are those of `bench_generate`.
    """
    if context is not None:
        request = request_of_rank(request, context)
    settings, choice = resolve_generate_settings(request, reporter=reporter)
    if context is None and settings.parallel.world_size > 1:
        refuse_data_parallel(settings)
        refuse_unfit(settings)
        _check_plot(options)
        require_devices(settings)
        settings = refined(settings, reporter=reporter)
    if choice is not None:
        reporter.note(choice)
    if context is None and settings.parallel.world_size > 1:
        start_ranks(settings, flags=rank_flags, command="bench-generate")
        return
    bench_generate(settings, tries, options, reporter=reporter, context=context, publish=publish)


def bench_generate(
    settings: GenerateSettings,
    tries: Mapping[str, Changes],
    options: BenchGenerateSettings,
    *,
    reporter: Reporter | None = None,
    context: RankContext | None = None,
    publish: Publish,
) -> None:
    """Make the video of `settings`, the exact run, and with each of `tries` the same, and `publish` what came of it.

    Nothing is kept of the videos. What was measured is published, and its chart written, where the comparison ends
    early, too. Models are loaded once where they have room together, and before the first run that differs in more than
    sampling, a few steps warm up; neither counts.

    Args:
        settings: of the exact run.
        tries: by name, what is changed; none: the standard set, but for what these settings do not allow, or what needs
            no fewer evaluations.
        options: how often, and what is written.
        reporter: shows what happens; None: nothing does.
        context: set in one of several ranks, all of which call this.
        publish: called once, by rank 0 alone.

    Raises:
        RequestError: the settings ask for more than one whole video, or contradict themselves.
        FileProblem: a reference or weights are missing or broken.
        OutputError: the chart exists already, or cannot be written.
        HardwareError: there is no such device, not enough memory, or no matplotlib.
    """
    reporter = reporter or SilentReporter()
    refuse_data_parallel(settings)
    refuse_unfit(settings)
    if context is None or context.is_main:
        _check_plot(options)
    settings = settings.replace(_NOTHING_KEPT)
    with ExitStack() as stack:
        device = None
        if context is None:
            settings = completed(settings, reporter)
        else:
            reporter = watched(reporter)
            settings, device = stack.enter_context(joined_to_generate(settings, context, reporter))
        bench = _Bench(reporter, device, stack.enter_context(LoadedModels(stay=True)))
        bench.plan(settings, tries)
        try:
            bench.run_all(options.repeats)
        except BaseException:
            with held_back():
                bench.publish_some(options, publish)
            raise
        if bench.is_main:
            bench.publish(options, publish)


def _check_plot(options: BenchGenerateSettings) -> None:
    if options.plot is not None:
        new_figure()  # without matplotlib, now and not after hours
        require_writable(Path(options.plot), overwrite=options.overwrite)


@dataclass(slots=True)
class _Setting:
    """What is compared, and what came of it."""

    name: str
    changes: Changes
    plan: ExecutionPlan
    figures: list[Figures] = field(default_factory=list)
    likeness: Likeness | None = None


class _Bench:
    """A comparison in one process; `device` is that of one of several ranks, None: it is alone."""

    def __init__(self, reporter: Reporter, device: torch.device | None, models: LoadedModels) -> None:
        self._reporter, self._device, self._models = reporter, device, models
        self._settings: list[_Setting] = []
        self._left_out: dict[str, str] = {}
        self._ranks: dict[object, Ranks] = {}
        self._warmed: set[str] = set()
        self._exact: Video | None = None
        self._exact_error = 0.0

    @property
    def is_main(self) -> bool:
        """Whether this process is alone, or rank 0."""
        return all(ranks.is_main for ranks in self._ranks.values())

    def plan(self, settings: GenerateSettings, tries: Mapping[str, Changes]) -> None:
        """Plan every run, before the first begins."""
        exact = self._plan(settings)
        require_weights(exact, self._reporter)
        require_room(exact, self._reporter)
        # The others compute with as many threads: sums depend on them.
        exact = exact.with_threads()
        self._settings.append(_Setting(EXACT, {}, exact))
        for name, changes in (tries or STANDARD).items():
            try:
                plan = self._plan(tried_settings(exact.settings, changes)).with_threads()
                require_weights(plan, SilentReporter())
                require_fit(plan)
                why = None if tries else _why_left_out(plan, exact, changes)
            except (OsoraError, ValidationError) as error:
                if tries:
                    raise
                why = "; ".join(explain(error)) if isinstance(error, ValidationError) else error.message
            if why is None:
                self._settings.append(_Setting(name, changes, plan))
            else:
                self._left_out[name] = why
        self._references = references_of(exact, self._reporter) if self.is_main else []

    def run_all(self, repeats: int) -> None:
        """Run every setting so often, back and forth."""
        for turn in range(repeats):
            for setting in self._settings if turn % 2 == 0 else reversed(self._settings):
                again = f", run {turn + 1} of {repeats}" if repeats > 1 else ""
                number = f"{self._settings.index(setting) + 1} of {len(self._settings)}"
                if (kernels := kernels_of(setting.plan)) not in self._warmed:
                    self._reporter.note(f"setting {number}: {setting.name}, a few steps to warm up")
                    self._run(warmed(setting.plan))
                    self._warmed.add(kernels)
                self._reporter.note(f"setting {number}: {setting.name}{again}")
                video, figures = self._run(setting.plan)
                self._compare(setting, video)
                setting.figures.append(figures)

    def publish(self, options: BenchGenerateSettings, publish: Publish) -> None:
        """Write the chart, and publish the report."""
        report = self._report(options, is_whole=True)
        if options.plot is not None:
            report.write_plot(options.plot, replace=options.overwrite)
        publish(report)

    def publish_some(self, options: BenchGenerateSettings, publish: Publish) -> None:
        """Do the same with what there is; nothing where no run has ended."""
        if not (self.is_main and self._exact is not None and self._settings[0].figures):
            return
        report = self._report(options, is_whole=False)
        if options.plot is not None:
            try:
                report.write_plot(options.plot, replace=options.overwrite)
            except OsoraError as error:
                self._reporter.warn(error.message)
                report = report.model_copy(update={"files": {}})
        publish(report)

    def _plan(self, settings: GenerateSettings) -> ExecutionPlan:
        if self._device is None:
            return make_plan(settings)
        plan = plan_of_rank(settings, self._device)
        self._ranks_of(plan)
        return plan

    def _ranks_of(self, plan: ExecutionPlan) -> Ranks | None:
        if self._device is None:
            return None
        key = plan.mesh, plan.exchange
        if key not in self._ranks:
            self._ranks[key] = Ranks(plan.mesh, self._device, plan.exchange)
        return self._ranks[key]

    def _run(self, plan: ExecutionPlan) -> tuple[Video | None, Figures]:
        ranks = self._ranks_of(plan)
        with Run(reporter=self._reporter, ranks=ranks, models=self._models).lending() as models:
            plan = models.planned(plan) if ranks is None else plan
            return run_once(plan, self._references, models, self._reporter, ranks=ranks)

    def _compare(self, setting: _Setting, video: Video | None) -> None:
        if video is None:
            return
        if self._exact is None:
            self._exact = video
        elif setting is self._settings[0]:
            self._exact_error = max(self._exact_error, latents_error(video.latents, self._exact.latents))
        elif setting.likeness is None:
            frames = video.frames_THWC
            # Other ranks wait: each frame is a sign of work.
            with self._reporter.stage("compare", total=len(frames), unit="frames") as progress:
                setting.likeness = likeness(
                    video.latents,
                    frames,
                    self._exact.latents,
                    self._exact.frames_THWC,
                    on_frame=progress.advance,
                )

    def _report(self, options: BenchGenerateSettings, *, is_whole: bool) -> BenchGenerateReport:
        exact = self._settings[0].plan
        notes = [] if is_whole else ["it ended early: this is what was measured until then"]
        if self._exact_error:
            notes.append(
                f"two exact runs differ by {self._exact_error:.2e} in their latents: kernels of this device do not add "
                "in the same order each time"
            )
        return BenchGenerateReport(
            of=exact.what,
            prompt=exact.settings.prompt,
            seed=exact.settings.sampling.seed,
            device=str(exact.hardware.device),
            device_name=exact.hardware.device_name,
            ranks=exact.mesh.size,
            repeats=options.repeats,
            settings=tuple(self._row(setting) for setting in self._settings if setting.figures),
            left_out=self._left_out,
            exact_error=self._exact_error,
            is_whole=is_whole,
            notes=tuple(notes),
            files={} if options.plot is None else {"plot": options.plot},
        )

    def _row(self, setting: _Setting) -> BenchedSetting:
        exact, figures, likeness = self._settings[0], setting.figures, setting.likeness
        stages = {name: median(each.stages_s.get(name, 0.0) for each in figures) for name in figures[0].stages_s}
        runs_s = [each.seconds for each in figures]
        peaks = [each.peak_gib for each in figures if each.peak_gib is not None]
        return BenchedSetting(
            name=setting.name,
            changes={key: "none" if value is None else str(value) for key, value in setting.changes.items()},
            ran=what_ran(setting.plan),
            runs=len(figures),
            stages_s={name: round(seconds, 4) for name, seconds in stages.items()},
            loading_s=round(sum(seconds for name, seconds in stages.items() if is_loading(name)), 4),
            seconds=round(median(runs_s), 4),
            spread_s=round(max(runs_s) - min(runs_s), 4),
            evaluations=figures[0].evaluations,
            speedup=median(each.seconds for each in exact.figures) / median(runs_s),
            peak_memory_gib=max(peaks, default=None),
            psnr_db=None if likeness is None else round(likeness.psnr_db, 3),
            ssim=None if likeness is None or likeness.ssim is None else round(likeness.ssim, 5),
            latents_error=None if likeness is None else likeness.latents_error,
            without_effect=self._why_without_effect(setting),
        )

    def _why_without_effect(self, setting: _Setting) -> str | None:
        exact, found = self._settings[0], setting.likeness
        if found is None or setting.figures[0].evaluations != exact.figures[0].evaluations:
            return None
        is_noise = 0 < found.latents_error <= self._exact_error
        if not (found.is_same or is_noise):
            return None
        return why_without_effect(setting.changes, setting.plan, exact.plan)


def _why_left_out(plan: ExecutionPlan, exact: ExecutionPlan, changes: Changes) -> str | None:
    """Return why a setting of the standard set makes no sense beside this exact run; None: it does."""
    idle = set(idle_guidance(plan.settings)) & set(changes)
    if idle:
        return f"{', '.join(sorted(idle))} has no effect with the distilled model {plan.settings.model.name}"
    if kernels_of(plan) == kernels_of(exact) and plan.model_evaluations >= exact.model_evaluations:
        return f"{plan.model_evaluations} evaluations, and the exact run takes {exact.model_evaluations}"
    return None
