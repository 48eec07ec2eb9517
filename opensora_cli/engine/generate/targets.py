"""The names of results: which are free, claimed, or made before by the same request. Needs no torch."""

import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError, safe_open

from opensora_cli.core.exceptions import CheckpointError, InUseError, OsoraWarning, OutputError
from opensora_cli.core.folder_lock import lock_beside, lock_holder, locked_file
from opensora_cli.media.files import media_path
from opensora_cli.media.names import file_stem, prompt_stem
from opensora_cli.media.results import in_the_way, is_there, read_sidecar, refuse_existing, result_bytes, sidecar_path
from opensora_cli.settings.enums import NameFrom
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA, usual_settings
from opensora_cli.settings.saved import flags_again

REQUEST_KEY = "request_sha256"
"""Key of sidecars and saved latents for the hash of everything that decides their bits."""
STEPS_KEY = "steps_done"
"""Key of saved latents for the number of steps done; absent after all steps."""
_SEEDS_PER_SEGMENT = 10_000
LATENTS_ENDING = ".latents.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFiles:
    """The files of one sample."""

    settings: GenerateSettings = field(repr=False, compare=False)
    """Settings of the run."""
    index: int
    seed: int
    target: Path
    """Requested file."""
    media: Path
    """Result: `target`, or the folder of a PNG sequence."""
    sidecar: Path | None
    """None where no metadata is wanted."""
    latents: Path | None
    """None where they are not saved, or come from a file already."""
    number: int = 1
    """Number of the name of a result in a folder: NAME, NAME_2, NAME_3 ..."""
    request_sha256: str = ""
    """The hash of everything that decides its bits."""
    made_before: bool = False
    """Whether an earlier run of the same request made the result, which is kept."""
    saved: Path | None = None
    """Latents to go on from: those asked for, or of a run of the same request that did not finish; None: none."""
    saved_steps: int | None = None
    """Steps that these have been through; None: all."""
    segment: int = 0
    """Number of the segment of an extended video."""

    @property
    def noise_seed(self) -> int:
        """The seed of its noise: its own, and of segment k 10,000·k more, which is more than a run has samples."""
        return self.seed + self.segment * _SEEDS_PER_SEGMENT

    def command(self, latents: Path, *, is_begun: bool) -> str:
        """Return the command that goes on from saved latents, with the flags that no file brings."""
        usual = usual_settings(self.settings.model.name)
        option = "--resume" if is_begun else "--from-latents"
        flags = flags_again(self.settings, usual, decodes=not is_begun)
        return " ".join(["osora generate", option, shlex.quote(str(latents)), *flags])

    @property
    def is_free(self) -> bool:
        """Whether nothing is `in_the_way`, and there are no latents; an OutputError names one that no file can have."""
        return in_the_way(self.media, self.sidecar) is None and not (self.latents and is_there(self.latents))


def num_samples(settings: GenerateSettings) -> int:
    """Return how many videos a run makes."""
    return 1 if settings.from_latents is not None else settings.sampling.num_samples


def sample_files(settings: GenerateSettings, index: int, *, number: int = 1) -> SampleFiles:
    """Return the files of a sample: in a folder named after prompt and seed, several of one given name numbered."""
    output, seed = settings.output, settings.sampling.seed + index
    kind, named = settings.output_format, Path(output.path)
    if output.named_format is None and output.name_from is NameFrom.PROMPT:
        target = named / f"{prompt_stem(settings.refine.original or settings.prompt, index=index)}.{kind}"
    elif output.named_format is None:
        # Named by seed: sample i is what seed + i makes on its own, so it has that name, too.
        again = "" if number == 1 else f"_{number}"
        # By what was typed: that is how a result is looked for.
        target = named / f"{file_stem(settings.refine.original or settings.prompt, seed=seed)}{again}.{kind}"
    elif num_samples(settings) > 1:
        target = named.with_stem(f"{named.stem}_{index:03d}")
    else:
        target = named
    latents = target.with_name(f"{target.stem}{LATENTS_ENDING}")
    if settings.sampling.stop_at is not None and not output.explore:
        target = target.with_stem(f"{target.stem}_step{settings.sampling.stop_at}")
    media = media_path(target, format=kind, num_frames=settings.video.num_frames)
    keeps_latents = output.save_latents and settings.from_latents is None
    return SampleFiles(
        settings=settings,
        index=index,
        number=number,
        seed=seed,
        target=target,
        media=media,
        sidecar=sidecar_path(media) if output.metadata else None,
        latents=latents if keeps_latents else None,
        saved=None if settings.from_latents is None else Path(settings.from_latents),
    )


def last_frame_path(video: Path) -> Path:
    """Return where the last frame of a video is kept."""
    return video.with_name(f"{video.stem}.last.png")


def segment_path(latents: Path, segment: int) -> Path:
    """Return the file for the latents of a finished segment, beside those of its sample."""
    return latents.with_name(f"{latents.name.removesuffix(LATENTS_ENDING)}.segment{segment + 1}{LATENTS_ENDING}")


def remove_latents(latents: Path) -> None:
    """Remove the saved latents of a complete result and of its segments, or warn if that fails."""
    try:
        latents.unlink(missing_ok=True)
        for segment in count():
            if not (path := segment_path(latents, segment)).exists():
                break
            path.unlink()
    except OSError as error:
        message = f"{latents} is not needed any more, but cannot be removed: {error.strerror or error}"
        warnings.warn(message, OsoraWarning, stacklevel=2)


def preview_path(target: Path) -> Path:
    """Return where the latest preview of a sample is kept."""
    return target.with_name(f"{target.stem}.preview.gif")


def sheet_path(first: Path) -> Path:
    """Return where the sheet of seeds that are explored is kept, by the result that the first of them would become."""
    return first.with_name(f"{first.stem}.explore.png")


class Claims:
    """Names and requests that this process has to itself until the block ends; one process of osora gets each."""

    def __init__(self) -> None:
        self._names, self._requests = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        # In this order: who gets a request finds the names of those that have finished it.
        with self._requests:
            self._names.close()

    @contextmanager
    def looking_at(self, sample: SampleFiles) -> Iterator[Callable[[], object] | None]:
        """Yield what keeps the names of a sample beyond the block; None where another process has them."""
        with ExitStack() as here:
            is_ours = here.enter_context(locked_file(_name_lock(sample)))
            yield (lambda: self._names.push(here.pop_all())) if is_ours else None

    @contextmanager
    def requesting(self, sample: SampleFiles) -> Iterator[Callable[[], object]]:
        """Yield what keeps the request of a sample, by the first of its names, beyond the block.

        Raises InUseError if another process has it.
        """
        lock = lock_beside(sample.media, f"{sample.request_sha256} {sample.media.name}")
        with ExitStack() as here:
            if not here.enter_context(locked_file(lock)):
                raise InUseError(
                    f"another run is making the same result in {sample.media.parent}: {lock_holder(lock)}",
                    hint="wait until it ends, or use another --out",
                )
            yield lambda: self._requests.push(here.pop_all())


def _name_lock(sample: SampleFiles) -> Path:
    """Return the lock file of a sample's name: results of one name in several formats have the same latents."""
    return lock_beside(sample.media, sample.target.stem)


def find_target(
    settings: GenerateSettings, index: int, request_sha256: Callable[[int], str], *, claims: Claims | None
) -> SampleFiles:
    """Return the files of a sample: those that the same request has made before or begun, else the first free ones.

    What it has begun are saved latents. A name in a folder that another request has taken gives way to the next one; a
    file that was named is never given another name. To overwrite replaces what the same request has made, else the
    first name. `request_sha256` returns the hash of a sample's request from its seed. Names are claimed if `claims` are
    given, and in a folder the request is, too; the folder is there then.

    Raises:
        CheckpointError: what is to be resumed is of another request.
        OutputError: a named file, its sidecar, or its latents are there from another request; or another process makes
            them; or no file can have such a name.
    """
    request = request_sha256(settings.sampling.seed + index)
    if claims is None or _is_named(settings):
        return _find_target(settings, index, request, claims=claims)
    first = replace(sample_files(settings, index), request_sha256=request)
    with claims.requesting(first) as keep:
        sample = _find_target(settings, index, request, claims=claims)
        if not sample.made_before:
            keep()
        return sample


def _is_named(settings: GenerateSettings) -> bool:
    return settings.output.named_format is not None or settings.output.name_from is NameFrom.PROMPT


def _find_target(settings: GenerateSettings, index: int, request: str, *, claims: Claims | None) -> SampleFiles:
    output = settings.output
    is_named = _is_named(settings)
    has_one_name = is_named or output.overwrite
    names: Iterator[SampleFiles] = (sample_files(settings, index, number=number) for number in count(1))
    if output.overwrite and not is_named:
        names = iter([_own_files(settings, index, request)])
    while True:
        sample = replace(next(names), request_sha256=request)
        with nullcontext(lambda: None) if claims is None else claims.looking_at(sample) as keep:
            if keep is None:
                if has_one_name:
                    raise InUseError(
                        f"{sample.media} is being made by another run: {lock_holder(_name_lock(sample))}",
                        hint="wait until it ends, or use another --out",
                    )
                continue
            if settings.resume is not None:
                keep()
                return _resumed(sample, Path(settings.resume), overwrite=settings.output.overwrite)
            # Looked at even with --overwrite: a name that no file can have is to be refused as well.
            if sample.is_free or output.overwrite:
                keep()
                return sample
            if read_made(sample).get(REQUEST_KEY) == request:
                return replace(sample, made_before=True)
            begun = _begun(sample)
            if begun.request_sha256 == request:
                keep()
                return replace(sample, saved=sample.latents, saved_steps=begun.steps)
            if has_one_name:
                refuse_existing(sample.media, sample.sidecar)
                raise OutputError(
                    f"{sample.latents} is there from a run that did not finish",
                    hint=f"go on with osora generate {begun.option} {shlex.quote(str(sample.latents))}, or start again "
                    "with --overwrite",
                )


def _resumed(sample: SampleFiles, state: Path, *, overwrite: bool) -> SampleFiles:
    """Return the files of a sample that is gone on with from `state`, or made before."""
    request = sample.request_sha256
    if not overwrite and read_made(sample).get(REQUEST_KEY) == request:
        return replace(sample, made_before=True)
    begun = _begun_in(state)
    if begun.request_sha256 != request:
        raise CheckpointError(
            f"{state} is of another request: settings, weights, versions, device or dtype are not the same",
            hint="go on where it was begun, without options that change the video",
        )
    if not overwrite:
        refuse_existing(sample.media, sample.sidecar)
    return replace(sample, saved=state, saved_steps=begun.steps)


def _own_files(settings: GenerateSettings, index: int, request: str) -> SampleFiles:
    """Return the files of a sample in a folder that the same request has made or begun, or else the first ones."""
    first = sample_files(settings, index)
    sample = first
    while any(is_there(path) for path in (sample.media, sample.sidecar, sample.latents) if path is not None):
        if request in (_described(sample).get(REQUEST_KEY), _begun(sample).request_sha256):
            return sample
        sample = sample_files(settings, index, number=sample.number + 1)
    return first


def read_made(sample: SampleFiles) -> Mapping[str, Any]:
    """Return the sidecar of a result that is there and whole; empty where there is none, or it is damaged."""
    document = _described(sample)
    try:
        return document if document.get("bytes") == result_bytes(sample.media) else {}
    except OSError:
        return {}


def is_begun(settings: GenerateSettings, sample: SampleFiles) -> bool:
    """Return whether an earlier run of the same request began a result and did not finish it: it left the sidecar, or
    the latents that this run goes on from. Extras that are there are of that run, too.
    """
    if sample.saved is not None and settings.from_latents is None:
        return True
    return not is_there(sample.media) and _described(sample).get(REQUEST_KEY) == sample.request_sha256


def _described(sample: SampleFiles) -> Mapping[str, Any]:
    """Return the sidecar of `sample`, whatever became of its media; empty where there is none."""
    document = {} if sample.sidecar is None else read_sidecar(sample.sidecar)
    is_of_this = (document.get("schema"), document.get("file")) == (SIDECAR_SCHEMA, sample.media.name)
    return document if is_of_this else {}


class _Begun(NamedTuple):
    """Metadata of saved latents."""

    request_sha256: str | None = None
    """None: there are none, or of another kind."""
    steps: int | None = None

    @property
    def option(self) -> str:
        """Option of the command line that continues from them."""
        return "--from-latents" if self.steps is None else "--resume"


def _begun(sample: SampleFiles) -> _Begun:
    """Return what the latents of a sample say that are there without a whole result."""
    if sample.latents is None or in_the_way(sample.media, sample.sidecar) is not None:
        return _Begun()
    return _begun_in(sample.latents)


def _begun_in(latents: Path) -> _Begun:
    try:
        with safe_open(latents, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
        return _Begun(metadata.get(REQUEST_KEY), steps_in(metadata))
    except (SafetensorError, OSError, ValueError):
        return _Begun()


def steps_in(metadata: Mapping[str, str]) -> int | None:
    """Return after how many steps latents were saved, from their metadata; None: after all.

    Raises ValueError if that is no number of steps.
    """
    words = metadata.get(STEPS_KEY)
    if words is None:
        return None
    if not words.isdecimal() or len(words) > 6:
        raise ValueError(f"{STEPS_KEY} is {words[:20]!r}")
    return int(words)
