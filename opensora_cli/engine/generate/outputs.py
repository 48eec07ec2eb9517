"""Files of results: free, claimed by another run, begun, or made before by the same request. Needs no torch."""

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opensora_cli.core.exceptions import CheckpointError, InUseError, OutputError
from opensora_cli.core.files import nearest_existing
from opensora_cli.core.locks import lock_beside, lock_holder, locked_file
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.generate.sample import LATENTS_ENDING, REQUEST_KEY, open_latents
from opensora_cli.media.names import file_stem, prompt_stem
from opensora_cli.media.results import (
    conflicting_file,
    is_there,
    media_path,
    read_sidecar,
    refuse_existing,
    result_bytes,
    sidecar_path,
)
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import NameFrom
from opensora_cli.settings.load import SIDECAR_SCHEMA, flags_again

if TYPE_CHECKING:
    from opensora_cli.engine.generate.chain import Chain

_SEEDS_PER_SEGMENT = 10_000
_BYTES_PER_PIXEL = 0.1
"""Disk space of a result. A compressed video rarely takes more."""
_HEADROOM = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFiles:
    """Files of one sample."""

    settings: GenerateSettings = field(repr=False, compare=False)
    """Settings of the run."""
    index: int
    seed: int
    target: Path
    """Requested file."""
    media: Path
    """Result: `target`, or the folder of a PNG sequence."""
    sidecar: Path | None
    """Settings beside the result; None without metadata."""
    latents: Path | None
    """File to save latents in; None if they are not saved."""
    number: int = 1
    """Number of the name in a folder: NAME, NAME_2, NAME_3 ..."""
    request_sha256: str = ""
    """Hash of everything that decides the bits of the result."""
    made_before: bool = False
    """Whether an earlier run of the same request made the result, which is kept."""
    saved: Path | None = None
    """Latents to continue from, requested or of an unfinished run of the same request; None without any."""
    saved_steps: int | None = None
    """Steps done in the latents to continue from; None for all steps."""
    segment: int = 0
    """Number of the segment of an extended video."""

    @property
    def last_frame(self) -> Path:
        return self.target.with_name(f"{self.target.stem}.last.png")

    @property
    def preview(self) -> Path:
        return self.target.with_name(f"{self.target.stem}.preview.gif")

    @property
    def sheet(self) -> Path:
        """File for the sheet of explored seeds, if this is the first."""
        return self.target.with_name(f"{self.target.stem}.explore.png")

    @property
    def noise_seed(self) -> int:
        """Seed of the noise of this segment. Segments are 10,000 seeds apart, more than a run has samples."""
        return self.seed + self.segment * _SEEDS_PER_SEGMENT

    @property
    def is_explored(self) -> bool:
        """Whether the saved latents have at least the steps that are explored."""
        stop = self.settings.sampling.stop_at
        if not self.settings.output.explore or self.saved is None or stop is None:
            return False
        return self.saved_steps is None or self.saved_steps >= stop

    def command(self, latents: Path, *, is_begun: bool) -> str:
        """Return the command that continues from saved latents, with the flags that no file brings."""
        flags = flags_again(self.settings, decodes=not is_begun)
        return " ".join(["osora generate --from", shlex.quote(str(latents)), *flags])


def sample_files(settings: GenerateSettings, index: int, *, number: int = 1, request_sha256: str = "") -> SampleFiles:
    """Return the files of a sample. In a folder they are named after prompt and seed."""
    output, seed = settings.output, settings.sampling.seed + index
    kind, named = settings.output_format, Path(output.path)
    typed_prompt = settings.refine.original or settings.prompt
    if output.named_format is not None:
        target = named.with_stem(f"{named.stem}_{index:03d}") if settings.num_samples > 1 else named
    elif output.name_from is NameFrom.PROMPT:
        target = named / f"{prompt_stem(typed_prompt, index=index)}.{kind}"
    else:
        # A sample of several has the same name as a single sample with its seed.
        suffix = "" if number == 1 else f"_{number}"
        target = named / f"{file_stem(typed_prompt, seed=seed)}{suffix}.{kind}"
    latents = target.with_name(f"{target.stem}{LATENTS_ENDING}")
    if settings.sampling.stop_at is not None and not output.explore:
        target = target.with_stem(f"{target.stem}_step{settings.sampling.stop_at}")
    media = media_path(target, format=kind, num_frames=settings.video.num_frames)
    return SampleFiles(
        settings=settings,
        index=index,
        seed=seed,
        target=target,
        media=media,
        sidecar=sidecar_path(media) if output.metadata else None,
        latents=latents if output.save_latents and settings.from_latents is None else None,
        number=number,
        request_sha256=request_sha256,
        saved=None if settings.from_latents is None else Path(settings.from_latents),
    )


def find_target(
    settings: GenerateSettings, index: int, request_sha256: str, *, claims: ExitStack | None
) -> SampleFiles:
    """Return the files of a sample: finished or begun files of the same request, else the first free name.

    A name in a folder that another request has taken gives way to the next one. A file that was named is never given
    another name. With `output.overwrite`, files of the same request are replaced, else files of the first name. With
    `claims`, no other process may use the names, and in a folder the request, until it closes; the folder must exist.
    """
    is_named = settings.output.named_format is not None or settings.output.name_from is NameFrom.PROMPT
    has_one_name = is_named or settings.output.overwrite

    named = partial(sample_files, settings, index, request_sha256=request_sha256)

    def in_use(what: str, lock: Path) -> InUseError:
        return InUseError(f"{what}: {lock_holder(lock)}", hint="wait until it ends, or use another --out")

    sample = named()
    with ExitStack() as locks:
        if claims is not None and not is_named:
            lock = lock_beside(sample.media, f"{request_sha256} {sample.media.name}")
            if not locks.enter_context(locked_file(lock)):
                raise in_use(f"another run is making the same result in {sample.media.parent}", lock)
        if settings.output.overwrite and not is_named:
            # Files that the request has made or begun, else the files of the first name.
            while request_sha256 not in (_sidecar_of(sample).get(REQUEST_KEY), _begun(sample)[0]):
                if not any(path and is_there(path) for path in (sample.media, sample.sidecar, sample.latents)):
                    sample = named()
                    break
                sample = named(number=sample.number + 1)
        while True:
            # Results of one name in several formats have the same latents.
            lock = lock_beside(sample.media, sample.target.stem)
            with ExitStack() as name_lock:
                if claims is None or name_lock.enter_context(locked_file(lock)):
                    found = _usable(sample, has_one_name=has_one_name)
                    if found is not None:
                        if claims is not None and not found.made_before:
                            # The name is released first: the next holder of the request finds the finished result.
                            locks.push(name_lock.pop_all())
                            claims.push(locks.pop_all())
                        return found
                elif has_one_name:
                    raise in_use(f"{sample.media} is being made by another run", lock)
            sample = named(number=sample.number + 1)


def _usable(sample: SampleFiles, *, has_one_name: bool) -> SampleFiles | None:
    """Return the files that a request uses under a name; None if they belong to another request."""
    state, overwrite = sample.settings.resume, sample.settings.output.overwrite
    # Also with --overwrite: this refuses names that no file can have.
    is_free = conflicting_file(sample.media, sample.sidecar) is None
    if state is None and (overwrite or (is_free and not (sample.latents and is_there(sample.latents)))):
        return sample
    if not overwrite and read_made(sample).get(REQUEST_KEY) == sample.request_sha256:
        return replace(sample, made_before=True)
    if state is not None:
        request, steps = _saved_request(Path(state))
        if request != sample.request_sha256:
            raise CheckpointError(
                f"{state} is of another request: settings, weights, versions, device or dtype are not the same",
                hint="continue where it was begun, without options that change the video",
            )
        if not overwrite:
            refuse_existing(sample.media, sample.sidecar)
        return replace(sample, saved=Path(state), saved_steps=steps)
    request, steps = _begun(sample)
    if request == sample.request_sha256:
        return replace(sample, saved=sample.latents, saved_steps=steps)
    if has_one_name:
        refuse_existing(sample.media, sample.sidecar)
        again = f"osora generate --from {shlex.quote(str(sample.latents))}, or start again with --overwrite"
        raise OutputError(f"{sample.latents} is there from a run that did not finish", hint=f"continue with {again}")
    return None


def note_earlier_work(files: Sequence[SampleFiles], reporter: Reporter) -> None:
    """Note the samples that are finished or begun, before the others are made."""
    advice = " (--overwrite makes it again)" if all(sample.made_before for sample in files) else ""
    for sample in files:
        if sample.made_before:
            reporter.note(f"made before by the same request: {sample.media}{advice}")
            if sample.settings.output.last_frame and not (last := sample.last_frame).exists():
                reporter.warn(f"{last} is not there: the video was made without it; --overwrite makes both")
        elif sample.saved is not None and sample.settings.from_latents is None:
            after = "" if sample.saved_steps is None else f", after step {sample.saved_steps}"
            word = "kept:" if sample.is_explored else "continuing from"
            reporter.note(f"{word} latents of the same request: {sample.saved}{after}")


def is_begun(sample: SampleFiles) -> bool:
    """Return whether an earlier run of the same request began the result. Files beside the result are of that run."""
    if sample.saved is not None and sample.settings.from_latents is None:
        return True
    return not is_there(sample.media) and _sidecar_of(sample).get(REQUEST_KEY) == sample.request_sha256


def read_made(sample: SampleFiles) -> Mapping[str, Any]:
    """Return the sidecar of a whole result; empty without one."""
    document = _sidecar_of(sample)
    try:
        return document if document.get("bytes") == result_bytes(sample.media) else {}
    except OSError:
        return {}


def _sidecar_of(sample: SampleFiles) -> Mapping[str, Any]:
    """Return the sidecar of a sample, with or without its media; empty without a sidecar."""
    document = {} if sample.sidecar is None else read_sidecar(sample.sidecar)
    is_own = document.get("schema") == SIDECAR_SCHEMA and document.get("file") == sample.media.name
    return document if is_own else {}


def _begun(sample: SampleFiles) -> tuple[str | None, int | None]:
    """Return the request hash and the steps in the latents of a sample; None if a result exists."""
    if sample.latents is None or conflicting_file(sample.media, sample.sidecar) is not None:
        return None, None
    return _saved_request(sample.latents)


def _saved_request(latents: Path) -> tuple[str | None, int | None]:
    try:
        saved = open_latents(latents)
    except CheckpointError:
        return None, None
    return saved.request_sha256, saved.steps


def continue_command(sample: SampleFiles) -> str | None:
    """Return the command that continues from the latest latents of a sample; None without a file of them."""
    if sample.latents is not None:
        request, steps = _saved_request(sample.latents)
        if request is not None and request == sample.request_sha256:
            return sample.command(sample.latents, is_begun=steps is not None)
    if sample.saved is None or not sample.saved.is_file():
        return None
    return sample.command(sample.saved, is_begun=sample.saved_steps is not None)


def check_outputs(chain: "Chain", *, create: bool) -> None:
    """Raise OutputError if the folder of results has no space or cannot be written; with `create` it is made."""
    plan, files = chain.video, sample_files(chain.settings, 0)
    folder, hint = files.media.parent, "choose another folder with --out"
    if create:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write in {folder}: {error.strerror or error}", hint=hint) from error
    parent = nearest_existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"cannot write in {folder}", hint=hint)
    of_sample = plan.height * plan.width * plan.num_frames * _BYTES_PER_PIXEL
    of_sample += 0 if files.latents is None else chain.latent_bytes
    needed = int(chain.settings.num_samples * of_sample) + _HEADROOM
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OutputError(
            f"{folder} has {free / 2**20:.1f} MiB free, and latents and results need {needed / 2**20:.1f} MiB",
            hint=f"make room there, or {hint}",
        )
