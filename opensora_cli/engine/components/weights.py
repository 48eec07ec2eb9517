"""Find weights on this machine, without a network request, and choose the model that they allow."""

import importlib.resources
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.core.progress import Reporter
from opensora_cli.models.registry import ARCHITECTURES, AUTO, DEMO, DOWNLOADS, OPEN_SORA_V2, WeightNames
from opensora_cli.models.text.sizes import CLIP_VOCABULARIES, T5_VOCABULARIES, missing_files
from opensora_cli.settings.components import VAEKind, settings_of
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.tools import EncodeSettings

DEFAULT_FOLDER = "ckpts"
"""Folder in the working directory that is searched by default; the download command writes there."""

Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and modification times of the files of a component, in place of their content."""


class Component(StrEnum):
    """Part of a video model with weights of its own."""

    TRANSFORMER = "transformer"
    VAE = "vae"
    T5 = "t5"
    CLIP = "clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Places of the weights of every component; `paths` has the components that were found."""

    model: str
    paths: Mapping[Component, Path]
    missing: Mapping[Component, tuple[str, ...]]
    """Names of the missing files of each component, below a weights folder."""
    looked_in: str
    """Searched places, as text."""
    download_folder: str

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def borrowed(self) -> list[Component]:
        """Return the components from the packaged demo that complete a transformer of another folder."""
        demo = packaged_demo()
        parts = [component for component, path in self.paths.items() if path.is_relative_to(demo)]
        return [] if Component.TRANSFORMER in parts else parts

    def path(self, component: Component) -> Path:
        """Return the file or folder of `component`, or raise CheckpointError as `require` does."""
        self.require([component])
        return self.paths[component]

    def require(self, components: Iterable[Component] = tuple(Component)) -> None:
        """Raise CheckpointError that names all missing files of `components`, and how to get them."""
        names = [name for component in components for name in self.missing.get(component, ())]
        if not names:
            return
        hint = _download_line(self.model, to=self.download_folder)
        if ARCHITECTURES[self.model].is_packaged:
            hint = "the demo is part of osora: install it again; name a file in another place by its absolute path"
        raise CheckpointError(
            f"weights of the {self.model} model are missing: {', '.join(names)} (looked in {self.looked_in})", hint=hint
        )


def find_weights(settings: GenerateSettings) -> WeightFiles:
    """Return the places of the weights for `settings`.

    Only the folder of `--weights` or `OSORA_WEIGHTS` is searched if there is one, otherwise `./ckpts`, then the Hugging
    Face cache, for each component. A named folder with a transformer of the demo's file name replaces parts of the
    packaged demo.
    """
    files, named = settings.files, settings.runtime.weights
    if not ARCHITECTURES[settings.model.name].is_packaged:
        return find_released(files, named, model=settings.model.name)
    # OSORA_WEIGHTS usually names the released model: a folder without a demo must not hide the packaged one.
    folders = [packaged_demo()]
    if named is not None and (Path(named) / files.transformer).exists():
        folders.insert(0, Path(named))
    return _locate(files, folders, model=settings.model.name, looked_in=" and ".join(map(str, folders)))


def require_named_demo(settings: GenerateSettings) -> None:
    """Raise CheckpointError if the folder of `--weights` has no transformer of the demo, so that nothing uses it."""
    folder, file = settings.runtime.weights, settings.files.transformer
    if folder is not None and not (Path(folder) / file).exists():
        hint = "name a folder of trained weights, or drop it to use the packaged demo"
        raise CheckpointError(f"{folder} has no {file} for the demo model", hint=hint)


def find_released(files: WeightNames, named: str | None, *, model: str = OPEN_SORA_V2) -> WeightFiles:
    """Return the places of the weights of a released model; see `find_weights`. `named` is the only searched folder."""
    if named is not None:
        return _locate(files, [Path(named)], model=model, looked_in=named, download_folder=named)
    # All released models use the text encoders of the first one.
    folders = _default_folders(files.hub_repo, WeightNames().hub_repo)
    looked_in = f"{Path(DEFAULT_FOLDER).absolute()} and the Hugging Face cache"
    return _locate(files, folders, model=model, looked_in=looked_in, use_hub=True)


def find_autoencoder(settings: EncodeSettings) -> Path:
    """Return the weights of an autoencoder, or raise a CheckpointError that names the searched places.

    Only the folder of `--weights` is searched if there is one, otherwise `./ckpts`, then the Hugging Face cache; the
    demo is in the package.
    """
    file, hub_repo, named = settings.weights.file, settings.weights.hub_repo, settings.runtime.weights
    folders = [packaged_demo()] if hub_repo is None else _default_folders(hub_repo)
    folders = folders if named is None else [Path(named)]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    hint = None if hub_repo is None else download_command(settings.vae.kind, to=named or DEFAULT_FOLDER)
    raise CheckpointError(
        f"weights of the autoencoder are missing: {file} (looked in {' and '.join(map(str, folders))})", hint=hint
    )


def needed_components(settings: GenerateSettings) -> tuple[Component, ...]:
    """Return the components whose weights a generation reads: decoding saved latents needs the autoencoder only."""
    return tuple(Component) if settings.from_latents is None else (Component.VAE,)


def require_weights_of(settings: GenerateSettings) -> None:
    """Raise CheckpointError if weights that `settings` need are missing."""
    find_weights(settings).require(needed_components(settings))


def warn_of_missing(check: Callable[[], object], reporter: Reporter) -> None:
    """Turn the FileProblem of `check` into a warning: a dry run plans without the files."""
    try:
        check()
    except FileProblem as error:
        reporter.warn("; ".join(filter(None, (f"a run would be refused: {error.message}", error.hint))))


def stamp_of(weights: Path | None) -> Stamp:
    """Return the stamp of a file, or of all files in a folder; it is empty if they cannot be read."""
    if weights is None:
        return ()
    try:
        files = sorted(path for path in weights.rglob("*") if path.is_file()) if weights.is_dir() else [weights]
        states = [(path.name, path.stat()) for path in files]
    except OSError:
        return ()
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def download_command(kind: VAEKind, *, to: str) -> str:
    """Return the command that downloads the missing files of the first model with this autoencoder."""
    return _download_line(next(name for name in DOWNLOADS if settings_of(name)["vae"]["kind"] == kind), to=to)


def _download_line(name: str, *, to: str) -> str:
    place = "" if to == DEFAULT_FOLDER else f" --to {shlex.quote(to)}"
    return f"osora ckpt download {name}{place}"


def packaged_demo() -> Path:
    """Return the folder of the demo model in the package."""
    return Path(str(importlib.resources.files("opensora_cli") / "assets" / "demo"))


def _default_folders(*hub_repos: str) -> list[Path]:
    snapshots = map(_hub_snapshot, dict.fromkeys(hub_repos))
    return [Path(DEFAULT_FOLDER), *filter(None, snapshots)]


def _hub_snapshot(repo: str) -> Path | None:
    """Return the folder of `repo` in the Hugging Face cache, without requests or the slow import of its library."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    places = (os.environ.get("HF_HUB_CACHE"), os.environ.get("HUGGINGFACE_HUB_CACHE"), os.path.join(home, "hub"))
    cache = Path(os.path.expandvars(os.path.expanduser(next(filter(None, places)))))
    folder = cache / f"models--{repo.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / revision
    return snapshot if revision and snapshot.is_dir() else None


def _locate(
    files: WeightNames,
    folders: Sequence[Path],
    *,
    model: str,
    looked_in: str,
    download_folder: str = DEFAULT_FOLDER,
    use_hub: bool = False,
) -> WeightFiles:
    """Return each component from the first folder that has all of it."""
    paths: dict[Component, Path] = {}
    missing: dict[Component, tuple[str, ...]] = {}
    for component in Component:
        name = str(getattr(files, component))
        candidates = [folder / name for folder in folders]
        if use_hub and component in (Component.T5, Component.CLIP):
            # Text encoders are often downloaded from their own repositories, which have these names.
            candidates += filter(None, [_hub_snapshot(name)])
        lacking = {path: _lacking(component, path) for path in candidates}
        best = min(lacking, key=lambda path: len(lacking[path]))
        if lacking[best]:
            # The most complete folder names the missing rest of an interrupted download.
            missing[component] = tuple(f"{name}{file.removeprefix(str(best))}" for file in lacking[best])
        else:
            paths[component] = best
    return WeightFiles(model=model, paths=paths, missing=missing, looked_in=looked_in, download_folder=download_folder)


def _lacking(component: Component, path: Path) -> list[str]:
    if component is Component.T5:
        return missing_files(path, vocabularies=T5_VOCABULARIES)
    if component is Component.CLIP:
        return missing_files(path, vocabularies=CLIP_VOCABULARIES)
    return [] if path.exists() else [str(path)]


def choose_model(
    choice: str,
    *,
    weights: str | None = None,
    device: str = "auto",
    loading: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[str, str]:
    """Return the model to run, and the reason.

    `auto` is the released model if its weights, under their published names, and a CUDA device are available, else the
    demo. Torch is imported only if it decides, in the context `loading`.
    """
    if choice != AUTO:
        return choice, "as asked"
    found = find_released(WeightNames(), weights)
    reasons = []
    if not found.complete:
        parts = f"weights ({', '.join(found.missing)})" if found.paths else "the weights"
        reasons.append(f"{parts} of {found.model} are missing{'' if weights is None else f' in {weights}'}")
    if device == "cpu":
        reasons.append("the CPU was asked for")
    elif found.complete or "torch" in sys.modules:
        with nullcontext() if "torch" in sys.modules else loading():
            from opensora_cli.core.device import has_gpu

        if not has_gpu():
            reasons.append("there is no CUDA device")
    if reasons:
        return DEMO, " and ".join(reasons)
    folder = found.paths[Component.TRANSFORMER].parent
    return OPEN_SORA_V2, f"its weights are in {folder}, and there is a CUDA device"
