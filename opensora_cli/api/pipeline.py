"""Generate videos in a Python program, with a model that stays loaded."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from opensora_cli.api.reporting import LoggingReporter, OnProgress
from opensora_cli.api.request import generate_request
from opensora_cli.api.video import Video
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.generate import run as engine
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.settings.explain import Given
from opensora_cli.settings.flags import Flags, given_flags
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Layer, collect_overrides

_File = str | os.PathLike[str]

_NOT_IN_A_CALL = (
    ("model", "is chosen once for all calls", "make a Pipeline(model) for each"),
    ("save_picture", "keeps a picture beside the file of its video", "make it with num_frames=1, and give it with ref"),
    ("num_samples", "is 1 in Python", "call once for each seed: sample i takes seed + i"),
    ("resume", "goes on with a run of the command line", "use osora generate --resume FILE"),
    ("save_state_every", "is for runs of the command line", "use osora generate --save-state-every N"),
    ("preview_every", "is for runs of the command line", "use osora generate --preview-every N"),
)


class Pipeline:
    """A model that is loaded once, when it is first needed, and makes many videos.

        with Pipeline("demo") as pipe:
            video = pipe("raining, sea", seed=7)
            video.save("sea.mp4")

    Keywords are the options of `osora generate`, `num_frames` for `--num-frames`; those of a call win over those of the
    pipeline. A call gives the same bits as the command line does with the same options, on a CPU with as many
    `threads`. Text encoders, transformer and autoencoder all stay where there is room for them; else as many as fit.
    Warnings go to `logging`, by the name `opensora_cli`.

    Threads may share a pipeline: it makes one video at a time, and the other calls wait, as does `close`.

    Args:
        model: auto, demo or a released model.
        config: a preset by name, or a file of settings.
        set: settings by key that have no option: `{"sampling.flow_shift": 3}`.
        progress: called with a `Progress` as the work goes on.
        flags: options of every call.

    Raises:
        RequestError: there is no such option or setting; the nearest is named.
    """

    def __init__(
        self,
        model: str = "auto",
        *,
        config: _File | None = None,
        set: Mapping[str, object] | None = None,
        progress: OnProgress | None = None,
        **flags: Unpack[Flags],
    ) -> None:
        named = {"runtime.model_choice": Given(model, "model")} if model != "auto" else {}
        self._given: Layer = named | _layer(flags, set)
        self._config = None if config is None else Path(config)
        self._reporter: Reporter = LoggingReporter(progress)
        self._models = LoadedModels(stay=True)
        # A function that is called with the progress of a call may make another one.
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
            prompt: what it shows; it may be in the settings already.
            from_: the sidecar of an earlier video, which describes it. Weights and adapters must be given again.
            set: settings by key that have no option.
            flags: the other options.

        Raises:
            RequestError: an option or setting is unknown, or breaks a rule.
            FileProblem: a reference, weights or settings are missing or broken.
            HardwareError: there is no such device, or not enough memory.

        In a process that was forked from one that has computed with several threads, a RequestError says so: start it
        with multiprocessing's method "spawn".
        """
        given = _layer(flags, set) | ({} if prompt is None else {"prompt": Given(prompt, "prompt")})
        request = generate_request(
            given, below=self._given, sidecar=None if from_ is None else Path(from_), config=self._config
        )
        with self._turn:
            return Video(engine.hold_from_request(request, self._models, reporter=self._reporter))

    def close(self) -> None:
        """Release the models; a later call loads them again."""
        with self._turn:
            self._models.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def generate(
    prompt: str | None = None,
    *,
    model: str = "auto",
    config: _File | None = None,
    from_: _File | None = None,
    set: Mapping[str, object] | None = None,
    progress: OnProgress | None = None,
    **flags: Unpack[Flags],
) -> Video:
    """Make one video, in memory; arguments and errors are those of `Pipeline` and of its call."""
    with Pipeline(model, config=config, progress=progress) as pipe:
        return pipe(prompt, from_=from_, set=set, **flags)


def _layer(flags: Mapping[str, object], assignments: Mapping[str, object] | None) -> dict[str, Given]:
    """Return the settings that keywords give; names that are not theirs alone are refused."""
    for name, rule, hint in _NOT_IN_A_CALL:
        if name in flags:
            raise RequestError(f"{name} {rule}", hint=hint)
    return collect_overrides(GenerateSettings, given_flags(flags), assignments or {})
