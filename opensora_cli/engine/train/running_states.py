"""The content of `running_states.json`, as far as a run that is resumed goes by it."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opensora_cli.checkpoint.formats.colossal import RUNNING_STATES_FILE, read_running_document
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain

_MAX_COUNT = 2**31
_MAX_THREADS = 1024  # as settings allow
_Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class PastAttention(BaseModel):
    """The attention that a run computed."""

    model_config = ConfigDict(frozen=True, strict=True)

    backend: str | None = None


class RunningStates(BaseModel):
    """The state of a run beside its tensors. Checkpoints of earlier versions lack what has a default."""

    model_config = ConfigDict(frozen=True, strict=True)

    global_step: _Count
    skipped_in_a_row: _Count
    micro_batches: Annotated[int, Field(gt=0, le=_MAX_COUNT)] | None = None
    threads: Annotated[int, Field(gt=0, le=_MAX_THREADS)] | None = None
    done: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=100)] = []
    attention: PastAttention = PastAttention()
    score: _Finite | None = None
    score_of: str | None = None


def read_running_states(folder: Path) -> RunningStates:
    """Return what a checkpoint of a run records. Raises CheckpointError if that is missing or broken."""
    path = folder / RUNNING_STATES_FILE
    document = read_running_document(folder)
    try:
        return RunningStates.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is broken: {plain(key)}: {plain(first['msg'])}") from None
