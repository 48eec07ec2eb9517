"""Generate videos in a Python program or a notebook, with a model that stays loaded."""

import base64
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, Unpack

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.progress import ConsoleReporter, Reporter, SilentReporter, StageProgress
from opensora_cli.engine.generate import run as engine
from opensora_cli.engine.generate.decode import Clip, Figures, write_video
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import check_outputs, find_target
from opensora_cli.engine.generate.plan import VIDEO
from opensora_cli.engine.generate.request import replaced
from opensora_cli.engine.generate.sample import remove_latents
from opensora_cli.engine.generate.sidecar import sample_settings
from opensora_cli.engine.show import continued
from opensora_cli.media.write import write_media
from opensora_cli.settings.flags import Flags, given_flags
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, Layer, collect_overrides
from opensora_cli.settings.load import generate_request

_File = str | os.PathLike[str]
_ARRAY_FPS = 24
"""Frame rate of an array that is a reference."""
_log = logging.getLogger("opensora_cli")

_NOT_IN_A_CALL = (
    ("model", "is chosen once for all calls", "make a Pipeline(model) for each"),
    ("save_picture", "keeps a picture beside the file of its video", "make it with num_frames=1, and give it with ref"),
    ("num_samples", "is 1 in Python", "call once for each seed: sample i takes seed + i"),
    ("resume", "continues a run of the command line", "use osora generate --from FILE"),
    ("save_state_every", "is for runs of the command line", "use osora generate --save-state-every N"),
    ("preview_every", "is for runs of the command line", "use osora generate --preview-every N"),
)


class Progress(NamedTuple):
    """Progress of a stage."""

    stage: str
    """load, text, denoise or decode, for example."""
    done: int
    total: int | None
    """None if unknown."""
    unit: str
    """Unit of `done`, such as evaluations, tiles or bytes."""


OnProgress = Callable[[Progress], object]
"""Called when a stage begins, and whenever it advances. An exception that it raises ends the run."""

_SMALL = 128
"""Longest side, in pixels, of a video that a notebook shows at twice its size."""


class Video:
    """Video in memory. Nothing is on disk until `save`; a notebook plays it as the value of a cell."""

    frames: Final[NDArray[np.uint8]]
    """Frames (T, H, W, 3), RGB, read-only."""
    fps: Final[int]
    """Frames per second."""
    seed: Final[int]
    """Seed of the noise."""
    settings: Final[GenerateSettings]
    """All settings that make this video again."""
    report: Final[Figures]
    """Seconds of each stage, peak memory, and PSNR of frames that references give."""

    def __init__(self, held: Clip, request_sha256: Callable[[int, str], str]) -> None:
        self._held, self._request_sha256 = held, request_sha256
        self.frames = held.frames_THWC.numpy().view()
        self.frames.flags.writeable = False
        self.fps = held.chain.settings.video.fps
        self.seed = held.files.seed
        self.settings = sample_settings(held.chain.video, held.files)
        self.report = held.figures()

    def save(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False) -> Path:
        """Write the video and its sidecar as `osora generate --out PATH` does, and return the path of the video.

        Args:
            path: file, or folder in which prompt and seed name the file. None: path of the settings, `samples`.
            overwrite: replace a file of another request. A file of the same request is kept.

        Raises:
            RequestError: the ending of `path` names no known format.
            OutputError: the file exists from another request, or cannot be written.
        """
        held, start = self._held, time.perf_counter()
        changes: dict[str, object] = {"output.overwrite": overwrite or held.chain.settings.output.overwrite}
        if path is not None:
            changes["output.path"] = os.fspath(path)
        settings = replaced(held.chain.settings, changes)
        chain = held.chain.change(lambda plan: replace(plan, settings=settings), only=VIDEO)

        def figures() -> Figures:
            return self.report.with_saving(time.perf_counter() - start)

        with ExitStack() as claims:
            check_outputs(chain, create=True)
            request = self._request_sha256(settings.sampling.seed, settings.output_format)
            sample = find_target(settings, 0, request, claims=claims)
            if not sample.made_before:
                write_video(replace(held, chain=chain, files=sample, figures=figures))
                if sample.saved is not None and sample.latents is not None:
                    # Latents of an interrupted run of the same request.
                    remove_latents(sample.latents)
        return sample.media

    def __repr__(self) -> str:
        frames, height, width, _ = self.frames.shape
        prompt = self._held.chain.settings.prompt
        return f"<Video {prompt!r}: {width}x{height}, {frames} frames at {self.fps} fps, seed {self.seed}>"

    def _repr_html_(self) -> str:
        count, height, width, _ = self.frames.shape
        kind = MediaFormat.PNG if count == 1 else MediaFormat.MP4
        if count > 1 and (height % 2 or width % 2):  # H.264 needs even sizes.
            kind = MediaFormat.GIF
        with tempfile.TemporaryDirectory(prefix="osora-show-") as folder:
            path = write_media([self._held.frames_THWC], Path(folder) / f"video.{kind}", fps=self.fps, format=kind)
            data = base64.b64encode(path.read_bytes()).decode()
        size = f'width="{2 * width}" ' if max(height, width) <= _SMALL else ""
        if kind is MediaFormat.MP4:
            return f'<video controls autoplay loop muted {size}src="data:video/mp4;base64,{data}"></video>'
        return f'<img {size}src="data:image/{kind};base64,{data}">'


class Pipeline(AbstractContextManager["Pipeline"]):
    """A model that is loaded once, when it is first needed, and makes many videos.

        with Pipeline("demo") as pipe:
            video = pipe("raining, sea", seed=7)
            video.save("sea.mp4")

    Keywords are the options of `osora generate`, `num_frames` for `--num-frames`; options of a call win over options of
    the pipeline. Results are bitwise identical to those of the command line with the same options and `threads`. As
    many of the models stay loaded as fit in memory. Warnings go to the logger `opensora_cli`.

    Threads may share a pipeline: it makes one video at a time, and other calls wait, `close` too.

    Args:
        model: auto, demo or a released model.
        config: preset by name, or file of settings.
        set: settings by key, for settings without an option: `{"sampling.flow_shift": 3}`.
        progress: called with a `Progress` during a call. "bar" shows a bar in terminals and notebooks, None nothing.
        flags: options of every call. `ref` also takes pictures of PIL, arrays of uint8 (H, W, 3) and (T, H, W, 3), and
            videos of earlier calls.

    Raises:
        RequestError: an option or setting does not exist; the hint names the nearest.
    """

    def __init__(
        self,
        model: str = "auto",
        *,
        config: _File | None = None,
        set: Mapping[str, object] | None = None,
        progress: OnProgress | Literal["bar"] | None = "bar",
        **flags: Unpack[Flags],
    ) -> None:
        self._references: Path | None = None
        named = {"runtime.model_choice": Given(model, "model")} if model != "auto" else {}
        with _python_errors():
            self._given: Layer = named | self._layer(flags, set)
        self._config = None if config is None else Path(config)
        self._reporter = _reporter(progress)
        self._models = LoadedModels(stay=True)
        # Reentrant: the progress function of a call may make another call.
        self._turn = threading.RLock()

    def __call__(
        self,
        prompt: str | None = None,
        *,
        from_: _File | None = None,
        set: Mapping[str, object] | None = None,
        **flags: Unpack[Flags],
    ) -> Video:
        """Make one video, in memory.

        Args:
            prompt: description of the video; settings may have it already.
            from_: result, sidecar or finished latents of an earlier run, to make its video again. Weights and adapters
                must be given again.
            set: settings by key, for settings without an option.
            flags: the other options.

        Raises:
            RequestError: an option or setting is unknown, or breaks a rule.
            FileProblem: a reference, weights or settings are missing or broken.
            HardwareError: the device does not exist, or has too little memory.

        In a process that was forked after computing with several threads, a call raises RequestError: start processes
        with multiprocessing's method "spawn".
        """
        with _python_errors():
            given = self._layer(flags, set) | ({} if prompt is None else {"prompt": Given(prompt, "prompt")})
            saved = None if from_ is None else continued(Path(from_), given)
            request = generate_request(given, below=self._given, saved=saved, config=self._config)
            with self._turn:
                return Video(*engine.hold_from_request(request, self._models, reporter=self._reporter))

    def _layer(self, flags: Mapping[str, object], assignments: Mapping[str, object] | None) -> dict[str, Given]:
        """Return the settings that keywords give. Raises RequestError for options of the command line alone."""
        for name, rule, hint in _NOT_IN_A_CALL:
            if name in flags:
                raise RequestError(f"{name} {rule}", hint=hint)
        if (references := flags.get("ref")) is not None:
            if self._references is None:
                self._references = Path(tempfile.mkdtemp(prefix="osora-references-"))
                weakref.finalize(self, shutil.rmtree, self._references, ignore_errors=True)
            given = references if isinstance(references, list | tuple) else [references]
            flags = {**flags, "ref": [_reference_file(reference, self._references) for reference in given]}
        return collect_overrides(GenerateSettings, given_flags(flags), assignments or {})

    def close(self) -> None:
        """Release the models; a later call loads them again."""
        with self._turn:
            self._models.release()
            self._models.prompts.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


def generate(
    prompt: str | None = None,
    *,
    model: str = "auto",
    config: _File | None = None,
    from_: _File | None = None,
    set: Mapping[str, object] | None = None,
    progress: OnProgress | Literal["bar"] | None = "bar",
    **flags: Unpack[Flags],
) -> Video:
    """Make one video, in memory. Arguments and errors are those of `Pipeline` and of its call."""
    with Pipeline(model, config=config, progress=progress) as pipe:
        return pipe(prompt, from_=from_, set=set, **flags)


def _reference_file(reference: object, folder: Path) -> str:
    """Return the file of a reference; one in memory is written to `folder` without loss. Equal ones have one file.

    Raises RequestError for arrays and objects that are no references.
    """
    if isinstance(reference, str | os.PathLike):
        return os.fspath(reference)
    if isinstance(reference, Image.Image):
        # Transparency and color profile are handled as in a file.
        path = folder / "picture.png"
        reference.save(path, icc_profile=reference.info.get("icc_profile"))
        return str(path.rename(_named(folder, path.read_bytes(), ".png")))
    fps = reference.fps if isinstance(reference, Video) else _ARRAY_FPS
    frames = np.ascontiguousarray(reference.frames if isinstance(reference, Video) else np.asarray(reference))
    if frames.dtype != np.uint8 or frames.ndim not in (3, 4) or frames.shape[-1] != 3 or not frames.size:
        described = f"{frames.dtype} {frames.shape}" if frames.ndim else type(reference).__name__
        raise RequestError(
            f"ref={described} is not a reference",
            hint="give a path, a PIL picture, a Video, or an array of uint8 (H, W, 3) or (T, H, W, 3)",
        )
    if frames.ndim == 3:
        return _reference_file(Image.fromarray(frames), folder)
    path = _named(folder, frames.tobytes() + str((fps, frames.shape)).encode(), ".mkv")
    with av.open(str(path), "w") as container:
        track = container.add_stream("ffv1", rate=fps)
        track.height, track.width = frames.shape[1:3]
        track.pix_fmt = "bgr0"
        for frame in frames:
            container.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(track.encode(None))
    return str(path)


def _named(folder: Path, content: bytes, ending: str) -> Path:
    return folder / f"{hashlib.sha256(content).hexdigest()[:16]}{ending}"


def _reporter(progress: OnProgress | Literal["bar"] | None) -> Reporter:
    if progress != "bar":
        return _ProgressReporter(progress)
    console = Console(stderr=True, highlight=False)
    return _BarReporter(console, has_bars=True) if console.is_interactive else _ProgressReporter(None)


@contextmanager
def _python_errors() -> Iterator[None]:
    """Put the hint into the text of an error."""
    try:
        yield
    except OsoraError as error:
        error.args = (f"{error.message}: {error.hint}" if error.hint else error.message,)
        raise


class _LogsMessages:
    """Reporter that logs warnings, and notes at the level INFO."""

    def note(self, text: str) -> None:
        _log.info("%s", text)

    def warn(self, text: str) -> None:
        _log.warning("%s", text)


class _BarReporter(_LogsMessages, ConsoleReporter):
    """Reporter that shows bars."""


class _ProgressReporter(_LogsMessages, SilentReporter):
    """Reporter that calls a function with the progress."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        stage = _Stage(Progress(name, 0, total, unit), self._on_progress)
        stage.advance(0)
        yield stage


class _Stage:
    def __init__(self, progress: Progress, on_progress: OnProgress | None) -> None:
        self._progress, self._on_progress = progress, on_progress

    def advance(self, amount: int = 1) -> None:
        self._progress = self._progress._replace(done=self._progress.done + amount)
        if self._on_progress is not None:
            self._on_progress(self._progress)
