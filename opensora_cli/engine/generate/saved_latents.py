"""Files of latents: complete before decoding, or the state of an unfinished run. Only tensors need torch."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from opensora_cli.core.exceptions import CheckpointError, OsoraWarning
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import parse_object, require_schema
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.generate import GenerateSettings

if TYPE_CHECKING:
    from torch import Tensor

LATENTS_SCHEMA = "osora.latents/1"
LATENTS_ENDING = ".latents.safetensors"
LATENTS_HINT = "--from takes the .latents.safetensors file of an unfinished run"
REQUEST_KEY = "request_sha256"
"""Key of sidecars and saved latents for the hash of their request."""
STEPS_KEY = "steps_done"
"""Key of saved latents for the number of steps done; absent after all steps."""

_KEY, _FINISHED_KEY, _PAST_KEY = "latents", "finished", "past"
_ATTENTION = "attention"
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class SavedLatents:
    """Description of a file of latents, whose tensors are read on request."""

    path: str | Path
    settings: Mapping[str, object]
    """Sections as in `GenerateSettings.model_dump(mode="json")`, for this one sample."""
    request_sha256: str | None
    """Hash of the request that made the latents."""
    steps: int | None = None
    """Steps done, including those of earlier segments; None for all steps."""
    attention: str | None = None
    """Attention backend that computed the latents; None in files of older versions."""

    def read(self) -> "list[Tensor]":
        """Return scaled latents (C,T,H,W) on the CPU: of finished segments, of the last one begun, and its velocities.

        The velocities are earlier ones that a solver or a step cache needs. Raises CheckpointError if the file is not
        whole any more, or some values are not finite.
        """
        with _opened(self.path) as file:
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise CheckpointError(f"{self.path} holds latents that are not finite", hint=LATENTS_HINT)
        return [*stored.get(_FINISHED_KEY, ()), stored[_KEY], *stored.get(_PAST_KEY, ())]


def save_latents(
    path: Path,
    latents_CTHW: "Tensor",
    settings: GenerateSettings,
    *,
    request_sha256: str = "",
    steps: int | None = None,
    finished: "Sequence[Tensor]" = (),
    past: "Sequence[Tensor]" = (),
    attention: str | None = None,
) -> None:
    """Write the latents of one sample to a whole file, or to none.

    Args:
        steps: steps done, including those of earlier segments; None for all steps.
        finished: latents of earlier segments of an extended video.
        past: earlier velocities that a solver or a step cache needs, shaped like latents.
        attention: attention backend that computed the latents.

    Raises OutputError if the file cannot be written.
    """
    import torch
    from safetensors.torch import save

    values = {STEPS_KEY: steps, _ATTENTION: attention}
    metadata = {
        "schema": LATENTS_SCHEMA,
        "settings": json.dumps(used_settings(settings)),
        REQUEST_KEY: request_sha256,
        **{key: str(value) for key, value in values.items() if value is not None},
    }
    tensors = {_KEY: latents_CTHW.detach().cpu().contiguous()}
    for key, others in ((_FINISHED_KEY, finished), (_PAST_KEY, past)):
        if others:
            tensors[key] = torch.stack([each.detach().cpu() for each in others])
    write_bytes_atomic(path, save(tensors, metadata=metadata))


def remove_latents(latents: Path) -> None:
    """Remove the saved latents of a complete result, or warn if that fails."""
    try:
        latents.unlink(missing_ok=True)
    except OSError as error:
        message = f"{latents} is not needed any more, but cannot be removed: {error.strerror or error}"
        warnings.warn(message, OsoraWarning, stacklevel=2)


def read_header(path: Path) -> dict[str, str] | None:
    """Return the metadata of saved latents; None for other files, and for broken ones."""
    try:
        with _opened(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (CheckpointError, ValueError):
        return None
    return metadata if metadata.get("schema", "").startswith("osora.latents/") else None


def open_latents(path: str | Path) -> SavedLatents:
    """Open the latents of a sample. Raises CheckpointError if the file is missing, truncated, or of another kind."""
    require_latents(path)
    with _opened(path, framework="numpy") as file:
        metadata: dict[str, str] = file.metadata() or {}
        if not metadata.get("schema", "").startswith("osora.latents/") or _KEY not in set(file.keys()):
            raise CheckpointError(f"{path} holds no latents of osora", hint=LATENTS_HINT)
        dtype = file.get_slice(_KEY).get_dtype()
    require_schema(metadata, LATENTS_SCHEMA, path, problem=CheckpointError, hint=LATENTS_HINT)
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path} holds latents of {dtype}, not of {', '.join(_DTYPES)}", hint=LATENTS_HINT)
    steps = metadata.get(STEPS_KEY)
    if steps is not None and (not steps.isdecimal() or len(steps) > 6):
        raise CheckpointError(f"{path} is damaged: {STEPS_KEY} is {plain(repr(steps))}", hint=LATENTS_HINT)
    try:
        settings = parse_object(metadata["settings"].encode("utf-8", "surrogatepass"))
    except (KeyError, ValueError):
        raise CheckpointError(f"{path} does not say which settings made it", hint=LATENTS_HINT) from None
    done = None if steps is None else int(steps)
    return SavedLatents(path, settings, metadata.get(REQUEST_KEY) or None, done, metadata.get(_ATTENTION))


def require_latents(path: str | Path) -> None:
    """Raise CheckpointError if a file of latents does not exist."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist or is no file", hint=LATENTS_HINT)


@contextmanager
def _opened(path: str | Path, *, framework: str = "pt") -> Iterator[Any]:
    try:
        with safe_open(path, framework=framework, device="cpu") as file:
            yield file
    except SafetensorError as error:
        reason = plain(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint=LATENTS_HINT) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
