"""Files of latents: complete before decoding, or the state of an unfinished run.

A video that is extended has a file for each finished segment beside the file of the segment in progress.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import require_schema
from opensora_cli.core.strict_json import parse_object
from opensora_cli.engine.generate.plan import Chain
from opensora_cli.engine.generate.ranks import Ranks, broadcast_tensors
from opensora_cli.engine.generate.request import LATENTS_HINT, require_latents
from opensora_cli.engine.generate.sample import DenoisedSample
from opensora_cli.engine.generate.targets import REQUEST_KEY, STEPS_KEY, SampleFiles, segment_path, steps_in
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.generate import GenerateSettings

LATENTS_SCHEMA = "osora.latents/1"
_KEY, _PAST_KEY = "latents", "past"
_STACKED_SEGMENTS_KEY = "latents_before"
_ATTENTION, _SEGMENT = "attention", "segment"
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

    def read(self) -> torch.Tensor:
        """Return the scaled latents (C,T,H,W) on the CPU.

        Raises CheckpointError if the file is not whole any more, or some values are not finite.
        """
        with _opened(self.path) as file:
            return self._finite(file.get_tensor(_KEY))

    def read_past(self) -> tuple[torch.Tensor, ...]:
        """Return the earlier velocities that a solver or a step cache needs; errors as `read`."""
        with _opened(self.path) as file:
            return self._finite(file.get_tensor(_PAST_KEY)).unbind() if _PAST_KEY in set(file.keys()) else ()

    def _finite(self, tensor: torch.Tensor) -> torch.Tensor:
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self.path} holds latents that are not finite", hint=LATENTS_HINT)
        return tensor


def save_latents(
    path: Path,
    latents_CTHW: torch.Tensor,
    settings: GenerateSettings,
    *,
    request_sha256: str = "",
    steps: int | None = None,
    segment: int | None = None,
    past: Sequence[torch.Tensor] = (),
    attention: str | None = None,
) -> None:
    """Write the latents of one sample to a whole file, or to none.

    Args:
        path: file to write.
        latents_CTHW: latents of a video, or of one segment.
        settings: settings that made the latents.
        request_sha256: hash of the request.
        steps: steps done, including those of earlier segments; None for all steps.
        segment: number of the finished segment that the file holds; None for the file of the sample.
        past: earlier velocities that a solver or a step cache needs, shaped like latents.
        attention: attention backend that computed the latents.

    Raises OutputError if the file cannot be written.
    """
    values = {STEPS_KEY: steps, _SEGMENT: segment, _ATTENTION: attention}
    metadata = {
        "schema": LATENTS_SCHEMA,
        "settings": json.dumps(used_settings(settings)),
        REQUEST_KEY: request_sha256,
        **{key: str(value) for key, value in values.items() if value is not None},
    }
    tensors = {_KEY: latents_CTHW.detach().cpu().contiguous()}
    if past:
        tensors[_PAST_KEY] = torch.stack([each.detach().cpu() for each in past])
    write_bytes_atomic(path, save(tensors, metadata=metadata))


def open_latents(path: str | Path, *, segment: int | None = None) -> SavedLatents:
    """Open the latents of a sample, or of a finished `segment`.

    Raises CheckpointError if the file is missing, truncated, or of another kind.
    """
    require_latents(path)
    with _opened(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
        keys = set(file.keys())
        if not metadata.get("schema", "").startswith("osora.latents/") or _KEY not in keys:
            raise CheckpointError(f"{path} holds no latents of osora", hint=LATENTS_HINT)
        require_schema(metadata, LATENTS_SCHEMA, path, problem=CheckpointError, hint=LATENTS_HINT)
        if _STACKED_SEGMENTS_KEY in keys:
            raise CheckpointError(
                f"{path} holds several segments in one file, as an earlier version of osora wrote them",
                hint="make the video again with --overwrite, or finish it with the version that began it",
            )
        found = metadata.get(_SEGMENT)
        if found != (None if segment is None else str(segment)):
            held = "no finished segment" if found is None else "a finished segment alone"
            raise CheckpointError(f"{path} holds {held}", hint="continue from the file without .segment in its name")
        dtype = file.get_slice(_KEY).get_dtype()
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path} holds latents of {dtype}, not of {', '.join(_DTYPES)}", hint=LATENTS_HINT)
        try:
            steps = steps_in(metadata)
        except ValueError as error:
            raise CheckpointError(
                f"{path} holds no latents of osora: {plain(str(error))}", hint=LATENTS_HINT
            ) from error
        try:
            settings = parse_object(metadata["settings"].encode("utf-8", "surrogatepass"))
        except (KeyError, ValueError):
            raise CheckpointError(f"{path} does not say which settings made it", hint=LATENTS_HINT) from None
        return SavedLatents(path, settings, metadata.get(REQUEST_KEY) or None, steps, metadata.get(_ATTENTION))


def read_saved(chain: Chain, files: SampleFiles, ranks: Ranks | None) -> tuple[DenoisedSample, ...]:
    """Return the saved latents of each begun segment of a sample; empty without a file.

    Rank 0 reads the files.

    Raises:
        RequestError: the latents have another shape, or are past `sampling.stop_at`.
        CheckpointError: a file is missing or broken, or was saved after a step that the request does not have.
    """
    if files.saved is None:
        return ()
    plan = chain.video
    stop, of_segment = plan.settings.sampling.stop_at, plan.num_steps
    keeps = plan.decodes_only or plan.settings.output.explore
    if stop is not None and not keeps and (files.saved_steps is None or files.saved_steps >= stop):
        after = "all steps" if files.saved_steps is None else f"step {files.saved_steps}"
        raise RequestError(
            f"sampling.stop_at={stop} is over: {files.saved} was saved after {after}",
            hint="go on without --stop-at, or stop later",
        )
    steps = chain.num_steps if files.saved_steps is None else files.saved_steps
    is_begun = 0 < steps < chain.num_steps
    finished, begun_steps = divmod(steps, of_segment)
    past = chain.segments[finished].past_times(begun_steps) if is_begun else {}
    count = finished + bool(begun_steps)
    tensors: list[torch.Tensor] = []
    if (ranks is None or ranks.is_main) and is_begun is not (files.saved_steps is None):
        file = open_latents(files.saved)
        for number in range(count - 1):
            part = open_latents(segment_path(Path(files.saved), number), segment=number)
            if part.request_sha256 != file.request_sha256:
                raise CheckpointError(f"{part.path} is of another request than {files.saved}")
            tensors.append(part.read())
        tensors += [file.read(), *file.read_past()]
    if ranks is not None:
        tensors = [tensor.cpu() for tensor in broadcast_tensors(tensors, device=ranks.device)]
    if any(tuple(each.shape) != plan.latent_shape for each in tensors):
        raise RequestError(
            f"{files.saved} holds latents of {tuple(tensors[-1].shape)}, and the settings ask for {plan.latent_shape}",
            hint="change neither size, length nor model when going on from latents",
        )
    if not tensors or len(tensors) != count + len(past):
        raise CheckpointError(
            f"{files.saved} was saved after step {steps} of {chain.num_steps}"
            + (f", and has {len(tensors)} latents, with those of earlier steps" if len(tensors) > 1 else ""),
            hint="remove it, and start again",
        )
    *complete, last = tensors[:count]
    return (
        *(DenoisedSample(latents_CTHW) for latents_CTHW in complete),
        DenoisedSample(last, steps=begun_steps or None, past=tuple(tensors[count:])),
    )


@contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        reason = plain(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint=LATENTS_HINT) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
