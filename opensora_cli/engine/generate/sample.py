"""One sample from noise to a result, and files of its latents. Only tensors need torch.

A file of latents is complete before decoding begins, or the state of an unfinished run.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from opensora_cli.core.exceptions import CheckpointError, OsoraWarning, RequestError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.formatting import plain
from opensora_cli.core.reading import parse_object, require_schema
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.generate import GenerateSettings

if TYPE_CHECKING:
    from torch import Tensor

    from opensora_cli.engine.generate.chain import Chain
    from opensora_cli.engine.generate.outputs import SampleFiles
    from opensora_cli.engine.generate.plan import Plan
    from opensora_cli.engine.generate.ranks import Ranks
    from opensora_cli.engine.generate.references import Reference

LATENTS_SCHEMA = "osora.latents/1"
LATENTS_ENDING = ".latents.safetensors"
REQUEST_KEY = "request_sha256"
"""Key of sidecars and saved latents for the hash of their request."""
STEPS_KEY = "steps_done"
"""Key of saved latents for the number of steps done; absent after all steps."""

_HINT = "--from takes the .latents.safetensors file of an unfinished run"
_KEY, _FINISHED_KEY, _PAST_KEY, _ATTENTION = "latents", "finished", "past", "attention"
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class DenoisedSample:
    """Latents of one clip, complete or after some steps."""

    latents_CTHW: "Tensor"
    """Latents on the CPU."""
    denoise_s: float = 0.0
    """Seconds of sampling; 0 for latents from a file."""
    steps: int | None = None
    """Steps done; None for all steps."""
    past: "tuple[Tensor, ...]" = ()
    """Earlier velocities of the solver or the step cache, shaped like latents, in the order of `last_times`."""


@dataclass(slots=True, eq=False)
class Sample:
    """One clip of a job: a sample of the request, or the picture, the draft or a segment of one."""

    chain: "Chain"
    """Request that the files belong to."""
    plan: "Plan"
    """Plan of the job."""
    files: "SampleFiles"
    references: "Sequence[Reference]" = ()
    saved: Sequence[DenoisedSample] = ()
    """Latents from a file: of each finished segment in order, then of the segment in progress."""
    earlier: "tuple[Tensor, ...]" = ()
    """latents_CTHW of the segments of an extended video before this one."""
    reference_latents: "Sequence[Tensor] | None" = None
    """latents_CTHW of each reference; None without references."""
    draft_CTHW: "Tensor | None" = None
    """Latents of the draft, for a plan with a `start`."""
    denoised: DenoisedSample | None = None
    """Complete latents; None before all steps are done."""

    def __post_init__(self) -> None:
        if self.saved and self.files.saved_steps is None:
            self.denoised = self.saved[-1]

    @property
    def begun(self) -> DenoisedSample | None:
        """Latents from a file that still need some steps; None without."""
        return self.saved[-1] if self.saved and self.denoised is None else None

    @property
    def steps_done(self) -> int:
        """Steps of the job that are computed, or skipped, when the run begins."""
        return self.plan.start if self.begun is None else self.begun.steps or 0


def unfinished(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.denoised is None]


def read_saved(chain: "Chain", files: "SampleFiles", ranks: "Ranks") -> tuple[DenoisedSample, ...]:
    """Return the saved latents of each begun segment of a sample, which rank 0 reads; empty without a file."""
    plan, saved, saved_steps = chain.video, files.saved, files.saved_steps
    if saved is None:
        return ()
    stop, keeps = plan.settings.sampling.stop_at, plan.decodes_only or plan.settings.output.explore
    if stop is not None and not keeps and (saved_steps is None or saved_steps >= stop):
        after = "all steps" if saved_steps is None else f"step {saved_steps}"
        raise RequestError(
            f"sampling.stop_at={stop} is over: {saved} was saved after {after}",
            hint="continue without --stop-at, or stop later",
        )
    steps = chain.num_steps if saved_steps is None else saved_steps
    finished, begun_steps = divmod(steps, plan.num_steps)
    count = finished + bool(begun_steps)
    # A file that has all steps does not count them.
    is_sound = saved_steps is None or 0 < saved_steps < chain.num_steps
    past = chain.segments[finished].past_times(begun_steps) if is_sound and steps < chain.num_steps else {}
    read = open_latents(saved).read() if is_sound and ranks.is_main else []
    tensors = [tensor.cpu() for tensor in ranks.same_tensors(read)]
    if any(tuple(each.shape) != plan.latent_shape for each in tensors):
        raise RequestError(
            f"{saved} holds latents of {tuple(tensors[-1].shape)}, and the settings ask for {plan.latent_shape}",
            hint="change neither size, length nor model when continuing from latents",
        )
    if not tensors or len(tensors) != count + len(past):
        raise CheckpointError(
            f"{saved} was saved after step {steps} of {chain.num_steps}, and its latents do not fit that",
            hint="remove it, and start again",
        )
    *complete, last = tensors[:count]
    return (
        *(DenoisedSample(latents_CTHW) for latents_CTHW in complete),
        DenoisedSample(last, steps=begun_steps or None, past=tuple(tensors[count:])),
    )


@dataclass(frozen=True, slots=True)
class SavedLatents:
    """Description of a file of latents, whose tensors are read on request."""

    path: str | Path
    settings: Mapping[str, object]
    """Sections as in `GenerateSettings.model_dump(mode="json")`, for this one sample."""
    request_sha256: str | None
    steps: int | None = None
    """Steps done, including those of earlier segments; None for all steps."""
    attention: str | None = None
    """Attention backend that computed the latents; None in files of older versions."""

    def read(self) -> "list[Tensor]":
        """Return scaled latents (C,T,H,W) on the CPU: of finished segments, of the last one begun, and its velocities.

        Raises CheckpointError if the file is not whole any more, or some values are not finite.
        """
        with _opened(self.path) as file:
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise CheckpointError(f"{self.path} holds latents that are not finite", hint=_HINT)
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


def open_latents(path: str | Path) -> SavedLatents:
    """Open the latents of a sample. Raises CheckpointError if the file is missing, truncated, or of another kind."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist or is no file", hint=_HINT)
    with _opened(path, framework="numpy") as file:
        metadata: dict[str, str] = file.metadata() or {}
        if not metadata.get("schema", "").startswith("osora.latents/") or _KEY not in set(file.keys()):
            raise CheckpointError(f"{path} holds no latents of osora", hint=_HINT)
        dtype = file.get_slice(_KEY).get_dtype()
    require_schema(metadata, LATENTS_SCHEMA, path, problem=CheckpointError, hint=_HINT)
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path} holds latents of {dtype}, not of {', '.join(_DTYPES)}", hint=_HINT)
    steps = metadata.get(STEPS_KEY)
    if steps is not None and (not steps.isdecimal() or len(steps) > 6):
        raise CheckpointError(f"{path} is damaged: {STEPS_KEY} is {plain(repr(steps))}", hint=_HINT)
    try:
        settings = parse_object(metadata["settings"].encode("utf-8", "surrogatepass"))
    except (KeyError, ValueError):
        raise CheckpointError(f"{path} does not say which settings made it", hint=_HINT) from None
    done = None if steps is None else int(steps)
    return SavedLatents(path, settings, metadata.get(REQUEST_KEY) or None, done, metadata.get(_ATTENTION))


@contextmanager
def _opened(path: str | Path, *, framework: str = "pt") -> Iterator[Any]:
    try:
        with safe_open(path, framework=framework, device="cpu") as file:
            yield file
    except SafetensorError as error:
        reason = plain(" ".join(str(error).split()))
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint=_HINT) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
