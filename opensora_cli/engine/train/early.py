"""Checks of a training run before torch is imported, ranks are started, and files are hashed."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from opensora_cli.checkpoint.formats.colossal import all_epoch_folders
from opensora_cli.core.exceptions import CheckpointError, OutputError, RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.weights import packaged_demo, warn_of_missing
from opensora_cli.engine.encode import inputs
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from opensora_cli.data.batches import ClipSource
    from opensora_cli.engine.train.objectives import TokenWeights

LOG_FILE = "log.jsonl"
MAX_LOG_BYTES = 2**30
TENSORBOARD_FOLDER = "tensorboard"
SAMPLES_FOLDER = "samples"


class Given(NamedTuple):
    """Arguments of `train` that a command cannot give."""

    source: "ClipSource | None" = None
    held_out: "ClipSource | None" = None
    token_weights: "TokenWeights | None" = None


def find_checkpoint(output: Path, resume: Path | bool) -> Path:
    """Return the checkpoint to resume from: `resume`, or the newest. Raises CheckpointError if there is none."""
    folders = all_epoch_folders(output) if output.is_dir() else []
    if not isinstance(resume, bool):
        resume = Path(resume)
        if not resume.is_dir():
            raise CheckpointError(f"{resume} is no folder of a checkpoint")
        # Use the path within the run's folder, so that it compares equal to its entry there.
        return next((each for each in folders if each.samefile(resume)), resume)
    if not folders:
        raise CheckpointError(
            f"{output} has no checkpoint to resume from", hint="start again with --overwrite in place of --resume"
        )
    return folders[0]


def refuse_early(settings: TrainSettings, *, resume: Path | bool, overwrite: bool, given: Given | None = None) -> None:
    """Check a run as far as that is possible without torch.

    Raises:
        RequestError: Arguments contradict each other or the settings, or no clips are named.
        FileProblem: A table is missing.
        CheckpointError: The checkpoint to resume from, the first weights or frozen parts are missing.
        OutputError: The folder holds an earlier run, and neither `resume` nor `overwrite` is given.
    """
    given = given or Given()
    _check_given(settings, given)
    check_output(settings, resume=resume, overwrite=overwrite)
    require_first_weights(settings)
    inputs.require_tables(settings, has_source=given.source is not None)
    require_frozen_weights(settings)


def _check_given(settings: TrainSettings, given: Given) -> None:
    validation = settings.validation
    for source, table, key in (
        (given.source, settings.data.table, "data.table"),
        (given.held_out, validation.table, "validation.table"),
    ):
        if source is not None and table is not None:
            raise RequestError(f"{key}={table} does not go with clips of a program", hint="drop one of them")
    if given.token_weights is not None and not settings.objective.weighs_tokens:
        raise RequestError(f"token_weights does not go with target={settings.target}", hint="drop it, or use mmdit")
    if given.token_weights is not None and settings.train_mmdit.masked_loss:
        raise RequestError("train_mmdit.masked_loss=true does not go with token_weights", hint="use one of them")
    if validation.every and given.held_out is None and validation.table is None:
        raise RequestError(
            f"validation.every={validation.every} needs held-out clips", hint="pass held_out, or set validation.table"
        )


def warn_of_missing_inputs(settings: TrainSettings, reporter: Reporter) -> None:
    """Warn of missing tables and weights, which a run needs and a plan does not."""
    warn_of_missing(lambda: require_first_weights(settings), reporter)
    warn_of_missing(lambda: inputs.require_tables(settings), reporter)
    warn_of_missing(lambda: require_frozen_weights(settings), reporter)


def check_output(settings: TrainSettings, *, resume: Path | bool, overwrite: bool) -> None:
    """Raise an error if the run's folder and the flags for an earlier run contradict each other."""
    output = Path(settings.output)
    if resume and overwrite:
        raise RequestError("--resume continues the run that --overwrite would remove: give one of them")
    if resume:
        find_checkpoint(output, resume)
        return
    checkpoints = [folder.name for folder in all_epoch_folders(output)[:1]] if output.is_dir() else []
    others = [name for name in (LOG_FILE, *settings.exports) if (output / name).exists()]
    found = [*checkpoints, *others]
    if found and not overwrite:
        resuming = "continue it with --resume, " if checkpoints else ""
        raise OutputError(
            f"{output} holds an earlier run: {', '.join(found)}",
            hint=f"{resuming}replace it with --overwrite, or give another folder: --set output=FOLDER",
        )


def find_first_weights(settings: TrainSettings) -> Path | None:
    """Return the file or folder of a run's first weights, which may not exist. None means random weights."""
    if settings.init == inputs.PACKAGED:
        return packaged_demo() / settings.objective.weights_file
    return None if settings.init is None else Path(settings.init)


def find_frozen_weights(settings: TrainSettings) -> dict[str, Path | None]:
    if settings.trains_transformer:
        return inputs.find_frozen_parts(settings)
    files = {file: Path(file) for file in settings.train_vae.perceptual_files}
    return {name: path if path.exists() else None for name, path in files.items()}


def require_frozen_weights(settings: TrainSettings) -> None:
    """Raise CheckpointError if frozen weights are missing; the message names all of them and how to get them."""
    if settings.trains_transformer:
        inputs.require_frozen_parts(settings)
    elif missing := [name for name, path in find_frozen_weights(settings).items() if path is None]:
        raise CheckpointError(f"train_vae.perceptual_files: {', '.join(missing)} does not exist")


def require_first_weights(settings: TrainSettings) -> None:
    """Raise CheckpointError if the file or folder of the first weights, or of the first adapter, is missing."""
    path, adapter = find_first_weights(settings), settings.lora.init
    if path is not None and not path.exists():
        raise CheckpointError(f"init={settings.init} does not exist", hint="name a file or folder of weights")
    if adapter is not None and not Path(adapter).exists():
        raise CheckpointError(f"lora.init={adapter} does not exist", hint="name an adapter's folder or file")
