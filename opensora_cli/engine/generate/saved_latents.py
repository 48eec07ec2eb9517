"""The latents of a sample in a file, before they are decoded, and where a run is stopped."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import require_schema
from opensora_cli.core.strict_json import parse_object
from opensora_cli.engine.generate.early import LATENTS_HINT, require_latents
from opensora_cli.engine.generate.targets import REQUEST_KEY, STEPS_KEY, steps_in
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.generate import GenerateSettings

LATENTS_SCHEMA = "osora.latents/1"
_KEY, _BEFORE_KEY, _PAST_KEY = "latents", "latents_before", "past"
_ATTENTION = "attention"
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class SavedLatents:
    """What such a file says of its latents, which are read on request."""

    path: str | Path
    settings: Mapping[str, object]
    """Sections as in `GenerateSettings.model_dump(mode="json")`, for this one sample."""
    request_sha256: str | None
    """Of what asked for them."""
    steps: int | None = None
    """Steps that they have been through, those of earlier segments included; None: all."""
    attention: str | None = None
    """The backend that computed it; None: an older version."""

    def read_segments(self) -> tuple[torch.Tensor, ...]:
        """Return the latents of each segment that was begun, as `read` does; all but the last are complete.

        A video that is not extended has one segment.
        """
        return (*self._read_stacked(_BEFORE_KEY), self.read())

    def read_past(self) -> tuple[torch.Tensor, ...]:
        """Return the `past` of `save_latents`, as `read` does; none if nothing looks back."""
        return self._read_stacked(_PAST_KEY)

    def read(self) -> torch.Tensor:
        """Return them as (C,T,H,W), scaled, as the autoencoder decodes them; on the CPU.
        Raises CheckpointError if the file is not whole any more, or some are not finite.
        """
        with _opened_latents(self.path) as file:
            latents_CTHW: torch.Tensor = file.get_tensor(_KEY)
        self._require_finite(latents_CTHW)
        return latents_CTHW

    def _read_stacked(self, key: str) -> tuple[torch.Tensor, ...]:
        with _opened_latents(self.path) as file:
            stacked = tuple(file.get_tensor(key)) if key in set(file.keys()) else ()
        for latents_CTHW in stacked:
            self._require_finite(latents_CTHW)
        return stacked

    def _require_finite(self, latents_CTHW: torch.Tensor) -> None:
        if not bool(latents_CTHW.isfinite().all()):
            raise CheckpointError(f"{self.path} holds latents that are not finite", hint=LATENTS_HINT)


def save_latents(
    path: Path,
    latents_CTHW: torch.Tensor,
    settings: GenerateSettings,
    *,
    request_sha256: str = "",
    steps: int | None = None,
    before: Sequence[torch.Tensor] = (),
    past: Sequence[torch.Tensor] = (),
    attention: str | None = None,
) -> None:
    """Write the latents of one sample, with the settings that took part in them; whole or not at all (OutputError).

    `steps` are those that they have been through, None: all. `before` has the latents_CTHW of the segments that are
    complete, of a video that is extended; `past` what a solver or a step cache looks back at, of the same shape.
    `attention` is the backend that computed it.
    """
    values = json.dumps(used_settings(settings))
    metadata = {"schema": LATENTS_SCHEMA, "settings": values, REQUEST_KEY: request_sha256}
    if steps is not None:
        metadata[STEPS_KEY] = str(steps)
    if attention is not None:
        metadata[_ATTENTION] = attention
    tensors = {_KEY: latents_CTHW.detach().cpu().contiguous()}
    for key, latents in ((_BEFORE_KEY, before), (_PAST_KEY, past)):
        if latents:
            tensors[key] = torch.stack([each.detach().cpu() for each in latents])
    write_bytes_atomic(path, save(tensors, metadata=metadata))


def open_latents(path: str | Path) -> SavedLatents:
    """Open a file of `save_latents`; a CheckpointError if it is missing, truncated, or not such a file."""
    require_latents(path)
    with _opened_latents(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
        schema = metadata.get("schema", "")
        if not schema.startswith("osora.latents/") or _KEY not in set(file.keys()):
            raise CheckpointError(f"{path} holds no latents of osora", hint=LATENTS_HINT)
        require_schema(metadata, LATENTS_SCHEMA, path, problem=CheckpointError, hint=LATENTS_HINT)
        dtype = file.get_slice(_KEY).get_dtype()
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path} holds latents of {dtype}, not of {', '.join(_DTYPES)}", hint=LATENTS_HINT)
        try:
            steps = steps_in(metadata)
        except ValueError as error:
            raise CheckpointError(
                f"{path} holds no latents of osora: {plain(str(error))}", hint=LATENTS_HINT
            ) from error
        settings, request, attention = _settings_in(path, metadata), metadata.get(REQUEST_KEY), metadata.get(_ATTENTION)
        return SavedLatents(path, settings, request or None, steps, attention)


@contextmanager
def _opened_latents(path: str | Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        reason = plain(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint=LATENTS_HINT) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _settings_in(path: str | Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        return parse_object(metadata["settings"].encode("utf-8", "surrogatepass"))
    except (KeyError, ValueError):
        raise CheckpointError(f"{path} does not say which settings made it", hint=LATENTS_HINT) from None
