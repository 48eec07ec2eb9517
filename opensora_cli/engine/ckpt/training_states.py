"""What a training keeps beside its weights, checked as far as can be without knowing what it is of."""

from collections.abc import Iterator, Set
from pathlib import Path

from opensora_cli.checkpoint.formats.colossal import OPTIMIZER_FOLDER, RUNNING_STATES_FILE
from opensora_cli.checkpoint.formats.torch import check_torch
from opensora_cli.checkpoint.shards import refuse_outside
from opensora_cli.checkpoint.strict_json import parse_object
from opensora_cli.core.exceptions import CheckpointError

_TORCH_SUFFIXES = (".pt", ".bin")
_MAX_RUNNING_STATES_BYTES = 2**20


def broken_states(folder: Path, *, known: Set[Path]) -> Iterator[str]:
    """Yield what is wrong with the states in one of ColossalAI's folders: of optimizer, schedule, sampler and run.

    Args:
        folder: the checkpoint's.
        known: files that have been opened already.
    """
    places = (path for place in (folder, folder / OPTIMIZER_FOLDER) if place.is_dir() for path in place.iterdir())
    states = sorted(path for path in places if path.suffix in _TORCH_SUFFIXES and path not in known)
    for path in states:
        try:
            check_torch(refuse_outside(path, folder))
        except CheckpointError as error:
            yield error.message
    running = folder / RUNNING_STATES_FILE
    if running.is_file():
        try:
            _check_json(refuse_outside(running, folder))
        except CheckpointError as error:
            yield error.message


def _check_json(path: Path) -> None:
    try:
        with path.open("rb") as file:
            parse_object(file.read(_MAX_RUNNING_STATES_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is broken: {error}") from None
