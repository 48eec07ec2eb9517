"""Plan a generation without running it."""

from functools import partial

from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.components.weights import require_weights_of, warn_of_missing
from opensora_cli.engine.encode.prompt_cache import PromptCache
from opensora_cli.engine.generate.documents import PlanDocument
from opensora_cli.engine.generate.encoded_text import without_cached_text
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.outputs import check_outputs, planned_outputs
from opensora_cli.engine.generate.picture import picture_settings
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.predicted import predict_time
from opensora_cli.engine.generate.preview_map import fitting_line, known_map
from opensora_cli.engine.generate.ranks import hardware_of_ranks, planned_hardware, request_of_rank
from opensora_cli.engine.generate.references import references_of, with_mode
from opensora_cli.engine.generate.refinement import note_plan
from opensora_cli.engine.generate.resolve import refuse_data_parallel, resolve_generate_settings
from opensora_cli.engine.generate.targets import sample_files
from opensora_cli.engine.generate.text import warn_about_planned_prompts
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.hardware import PlannedMachine
from opensora_cli.settings.load import GenerateRequest


def plan_from_request(
    request: GenerateRequest, *, reporter: Reporter, context: RankContext | None = None
) -> PlanDocument:
    """Choose the model, complete the settings, and return the plan; errors are those of
    `resolve_generate_settings` and `plan_generation`.
    """
    if context is not None:
        request = request_of_rank(request, context)
    settings, choice = resolve_generate_settings(request, reporter=reporter)
    refuse_data_parallel(settings)
    note_plan(settings, reporter)
    if request.on is not None:
        return _plan_elsewhere(settings, request.on, reporter)
    for part in filter(None, (picture_settings(settings), settings)):
        warn_of_missing(partial(require_weights_of, part), reporter)
    hardware = planned_hardware(settings, reporter) if context is None else None
    plan = plan_generation(settings, reporter=reporter, hardware=hardware)
    if choice is not None:
        reporter.note(choice)
    return PlanDocument.of(plan)


def _plan_elsewhere(settings: GenerateSettings, machine: PlannedMachine, reporter: Reporter) -> PlanDocument:
    """Return the plan for GPUs that need not be here, with the time that is predicted for them."""
    parallel = settings.parallel
    machine.require(device=settings.runtime.device, ranks=parallel.world_size, ranks_per_node=parallel.ranks_per_node)
    plan = plan_generation(settings, reporter=reporter, hardware=hardware_of_ranks(settings, gpu=machine.gpu))
    return PlanDocument.of(plan, predicted=predict_time(plan, machine.gpu))


def plan_generation(
    settings: GenerateSettings, *, reporter: Reporter, hardware: Hardware | None = None
) -> ExecutionPlan:
    """Return what `run.generate` would do, after the checks that need neither weights nor enough memory.

    `hardware`: a device that is not here; None: as `make_plan`. Errors as `run.generate`, but for those of missing
    weights and of too little memory.
    """
    plan = make_plan(with_mode(settings, reporter), hardware=hardware, tries_device=hardware is None)
    if plan.hardware.is_here:
        plan = without_cached_text(plan, PromptCache.of_user())
    _note_names(plan, reporter)
    references_of(plan, reporter)
    warn_about_planned_prompts(plan, reporter)
    for line in filter(None, (plan.size_note, plan.fitting.ignored)):
        reporter.note(line)
    if settings.output.makes_previews and plan.weights.complete and known_map(plan) is None:
        reporter.note(f"previews: {fitting_line(plan)}")
    return plan


def _note_names(plan: ExecutionPlan, reporter: Reporter) -> None:
    """Report which results are there already, and what a run would do; errors are those that no other name avoids."""
    first = [sample_files(plan.settings, index) for index in range(plan.num_samples)]
    check_outputs(first, plan, create=False)
    if plan.settings.output.overwrite or all(sample.is_free for sample in first):
        return
    files, refused = planned_outputs(plan)
    if refused is not None:
        reporter.note(f"{refused.message}; {refused.hint}")
        return
    for sample, named in zip(files, first, strict=True):
        if sample.made_before:
            reporter.note(f"made before by the same request: {sample.media}")
        elif sample.media != named.media:
            reporter.note(f"{named.media} exists already: the result would be {sample.media.name}")
