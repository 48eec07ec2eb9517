"""Settings and plan of a request in one process."""

from dataclasses import replace
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.threads import ThreadChoice
from opensora_cli.engine.components.weights import choose_model
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import VIDEO, Chain
from opensora_cli.engine.generate.planning import make_chain, rank_hardware
from opensora_cli.engine.generate.references import with_mode
from opensora_cli.engine.generate.refinement import refined
from opensora_cli.engine.generate.saved_latents import open_latents
from opensora_cli.engine.generate.targets import LATENTS_ENDING
from opensora_cli.engine.generate.text import without_cached_text
from opensora_cli.models.registry import AUTO
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest, SavedSettings, load_generate_settings
from opensora_cli.settings.saved import saved_format


def resolve_generate_settings(request: GenerateRequest, *, reporter: Reporter) -> tuple[GenerateSettings, str | None]:
    """Return the settings of a request on this machine, and a note on the model unless the request names it.

    Saved latents bring the settings that made them. `reporter` gets the notes of the request.

    Raises:
        RequestError: A key is unknown, or a value breaks a rule.
        FileProblem: A file of settings or the saved latents are missing or broken.
    """
    from_latents = request.overrides.get("from_latents")
    resume = request.overrides.get("resume")
    if resume is not None and request.saved is None:
        request = replace(request, saved=_settings_in(str(resume.value)))
    elif from_latents is not None and request.saved is None:
        request = replace(request, saved=replace(_settings_in(str(from_latents.value)), decodes=True))
    device = request.text("runtime.device") or "auto"
    model, reason = choose_model(request.model, weights=request.text("runtime.weights"), device=device)
    settings = load_generate_settings(request, model=model)
    for line in request.notes:
        reporter.note(line)
    return settings, f"model: {model} ({reason})" if request.model == AUTO else None


def _settings_in(latents: str) -> SavedSettings:
    """Return the settings that made saved latents. The result goes beside them, under their name."""
    saved = SavedSettings(source=latents, values=open_latents(latents).settings)
    try:
        ending = saved_format(saved.layer)
    except RequestError as error:
        raise CheckpointError(f"{latents} holds settings that this version of osora does not know") from error
    place = Path(latents)
    return replace(saved, output=place.with_name(f"{place.name.removesuffix(LATENTS_ENDING)}.{ending}"))


def refuse_data_parallel(settings: GenerateSettings) -> None:
    """Raise RequestError if one request is to be spread over devices that share nothing."""
    degree = settings.parallel.data_parallel_degree
    if degree is not None and degree > 1:
        raise RequestError(
            f"parallel.data_parallel_degree={degree} spreads the rows of --prompts, and this is one request",
            hint="drop it: the devices share the video",
        )


def completed(settings: GenerateSettings, reporter: Reporter) -> GenerateSettings:
    """Return settings for one process alone, with a prompt that is rewritten, if that is wanted, and with their mode.

    Raises RequestError if they are for several devices, or nothing suits the references, and MediaError as `with_mode`.
    """
    parallel = settings.parallel
    if parallel.world_size > (parallel.data_parallel_degree or 1):
        raise RequestError(
            f"{parallel.world_size} devices are asked for, and this is one process",
            hint="start with osora generate --gpus N, torchrun or srun",
        )
    return with_mode(refined(settings, reporter=reporter), reporter)


def plan_here(
    settings: GenerateSettings,
    models: LoadedModels | None,
    *,
    device: str | None = None,
    by: str | None = None,
    threads: ThreadChoice | None = None,
) -> Chain:
    """Return the jobs of a request for a process that shares no video with others; see `make_chain`.

    Args:
        settings: settings with a condition mode.
        models: loaded models, which the plan may keep or release.
        device: device of one of several ranks; None for the device of `settings`.
        by: source of the number of threads.
        threads: threads of an earlier plan; None to choose them.
    """
    models = LoadedModels() if models is None else models
    hardware = rank_hardware(settings, device=device)
    # The memory of loaded models can be released.
    free = hardware.free_bytes + models.bytes_on(hardware.device)
    chain = make_chain(settings, hardware=replace(hardware, free_bytes=free))
    if threads is not None:
        chain = chain.change(lambda plan: replace(plan, threads=threads))
    return without_cached_text(chain, models.prompts, by=by).change(models.planned, only=VIDEO)
