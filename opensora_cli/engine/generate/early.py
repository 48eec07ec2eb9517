"""What a request is refused for before torch is imported, which takes longer than all that is checked here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError, OsoraError, RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.weights import choose_model_early, require_weights_of
from opensora_cli.engine.generate.picture import picture_settings
from opensora_cli.engine.generate.refinement import require_refinement
from opensora_cli.engine.generate.targets import num_samples, read_made, sample_files
from opensora_cli.media.files import readable_file
from opensora_cli.media.results import refuse_existing
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest, load_generate_settings, load_runtime_settings

_SAMPLED = frozenset(
    {"prompt", "negative_prompt", "refine", "prompt_suffix", "sampling", "condition", "model", "text", "loras"}
    | {
        "draft",
        "picture",
        "precision.linear",
        "compile",
        "runtime.attention",
        "output.save_state_every",
        "output.preview_every",
        "video.extend",
        "prompts_at",
    }
)
"""Settings that have no effect on latents that are there."""

_PER_NODE = 8
"""GPUs of a machine with H100s."""

LATENTS_HINT = "--from-latents and --resume take the .latents.safetensors file of an unfinished run"


def refuse_early(request: GenerateRequest, *, dry_run: bool, reporter: Reporter) -> None:
    """Refuse what is wrong with a request as far as that is known without torch; the run checks all of it again.

    What is noted of the files of settings is reported where the request is refused, and else by the run.

    Raises:
        RequestError: a key is unknown, or a value breaks a rule, or no server is named that the prompt is for.
        FileProblem: settings, a reference, saved latents, an adapter or instructions are missing.
        CheckpointError: weights are missing, and this is no dry run.
        OutputError: a named result exists already, and this is no dry run.
    """
    notes: list[str] = []
    try:
        settings = settings_early(request, notes)
        if settings is None:
            return
        for reference in settings.condition.references:
            readable_file(reference)
        for lora in settings.loras if settings.from_latents is None else ():
            if ":" not in lora.path and not Path(lora.path).exists():
                raise CheckpointError(f"{lora.path} is no folder with an adapter, and no file of one")
        if not dry_run:
            require_refinement(settings)
            _require_weights(settings)
            _refuse_named(settings)
    except (OsoraError, ValueError):
        for line in notes:
            reporter.note(line)
        raise


@contextmanager
def dry_run_named(request: GenerateRequest) -> Iterator[None]:
    """Name in what a request for several GPUs is refused for, where there are none, the dry run that plans for them."""
    try:
        yield
    except OsoraError as error:
        gpus, device = (request.overrides.get(key) for key in ("parallel.gpus", "runtime.device"))
        count = int(str(gpus.value)) if gpus is not None and str(gpus.value).isdigit() else 1
        is_here = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
        if count > 1 and not is_here and (device is None or device.value != "cpu"):
            whole = count if count <= _PER_NODE else -(-count // _PER_NODE) * _PER_NODE
            planned = f"--dry-run --on {whole}xH100 plans it for GPUs that are not here"
            error.hint = "; ".join(filter(None, (error.hint, planned)))
        raise


def require_latents(path: str | Path) -> None:
    """Raise CheckpointError if a file of latents is not there."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist or is no file", hint=LATENTS_HINT)


def refuse_sampled(overrides: Mapping[str, Given], saved: Mapping[str, object]) -> None:
    """Refuse settings that decided latents which are saved already, where they are given again with other values."""
    for key, given in overrides.items():
        section, _, name = key.partition(".")
        values = saved.get(section)
        before = values.get(name) if name and isinstance(values, dict) else values
        if (section in _SAMPLED or key in _SAMPLED) and str(given.value) != str(before):
            shown = given.source if given.source != "--set" else key
            raise RequestError(
                f"{shown} has no effect with --from-latents, which the model has made already: drop {shown}"
            )


def settings_early(request: GenerateRequest, notes: list[str]) -> GenerateSettings | None:
    """Return the settings that a request means; None where that takes torch to know.

    What is noted of the files of settings is added to `notes`. Errors are those of `refuse_early`.
    """
    latents = request.overrides.get("from_latents")
    latents = latents or request.overrides.get("resume")
    if latents is not None:
        require_latents(str(latents.value))
        if request.saved is None:
            return None  # they are in the file
    runtime = load_runtime_settings(request)
    model = choose_model_early(runtime.model_choice, weights=runtime.weights, device=runtime.device)
    return None if model is None else load_generate_settings(request, model=model, report=notes.append)


def _require_weights(settings: GenerateSettings) -> None:
    picture = picture_settings(settings)
    if picture is not None:
        try:
            require_weights_of(picture)
        except CheckpointError as error:
            hint = f"{error.hint}; --set picture.first=false makes no picture first"
            raise CheckpointError(error.message, hint=hint) from error
    require_weights_of(settings)


def _refuse_named(settings: GenerateSettings) -> None:
    """Refuse a named result that is there, unless it may be what the same request has made before."""
    if settings.output.named_format is None or settings.output.overwrite:
        return
    for index in range(num_samples(settings)):
        sample = sample_files(settings, index)
        made = read_made(sample)
        if (made.get("seed"), made.get("prompt")) != (sample.seed, settings.prompt):
            refuse_existing(sample.media, sample.sidecar)
