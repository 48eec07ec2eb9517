"""Finding weights on this machine, without any request to a network, and choosing the model that they allow."""

import importlib.resources
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError, FileProblem
from opensora_cli.core.progress import Reporter
from opensora_cli.models.text.files import CLIP_VOCABULARIES, T5_VOCABULARIES, missing_files
from opensora_cli.settings.components import FileSettings
from opensora_cli.settings.enums import DownloadPreset, ModelChoice, ModelName, VAEKind
from opensora_cli.settings.generate import GenerateSettings

DEFAULT_FOLDER = "ckpts"
"""Where weights are looked for in the working directory, and where the download command puts them."""


_DOWNLOADS = {
    VAEKind.HUNYUAN: DownloadPreset.OPEN_SORA_V2,
    VAEKind.DC_AE: DownloadPreset.OPEN_SORA_V2_DC_AE,
    VAEKind.FLUX_AE: DownloadPreset.FLUX1_DEV,
}
"""What `osora ckpt download` calls the weights of each autoencoder."""


Stamp = tuple[tuple[str, int, int], ...]
"""Names, sizes and times of change of the files of a component: what stands for their content."""


class Component(StrEnum):
    """A part of a video model that has weights of its own."""

    TRANSFORMER = "transformer"
    VAE = "vae"
    T5 = "t5"
    CLIP = "clip"

    @property
    def is_folder(self) -> bool:
        """Whether its weights are a transformers folder and not one file."""
        return self in (Component.T5, Component.CLIP)


ALL_COMPONENTS = tuple(Component)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Where every component's weights are; a component that was not found is not in `paths`."""

    model: ModelName
    paths: Mapping[Component, Path]
    missing: Mapping[Component, tuple[str, ...]]
    """What each component lacks, below a weights folder."""
    looked_in: str
    """Where, in words."""
    download_folder: str

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def borrowed(self) -> list[Component]:
        """Return the parts of the packaged demo that complete a transformer from elsewhere."""
        demo = packaged_demo()
        parts = [component for component, path in self.paths.items() if path.is_relative_to(demo)]
        return [] if Component.TRANSFORMER in parts else parts

    def path(self, component: Component) -> Path:
        """Return the file or folder of `component`; CheckpointError as in `require` if it is missing."""
        self.require([component])
        return self.paths[component]

    def require(self, components: Iterable[Component] = ALL_COMPONENTS) -> None:
        """Check that the weights of `components` are there.

        A CheckpointError names everything that is missing at once, where it was looked for, and how to get it.
        """
        lacking = [component for component in components if component in self.missing]
        if not lacking:
            return
        names = [name for component in lacking for name in self.missing[component]]
        raise CheckpointError(
            f"weights of the {self.model} model are missing: {', '.join(names)} (looked in {self.looked_in})",
            hint=self._how_to_get(),
        )

    def _how_to_get(self) -> str:
        if self.model is ModelName.DEMO:
            return "the demo comes with osora: install it again; a file elsewhere is named by its absolute path"
        return _download_line(self.model.value, to=self.download_folder)


def find_weights(settings: GenerateSettings) -> WeightFiles:
    """Return where the weights for `settings` are.

    A folder that was named (`--weights`, `OSORA_WEIGHTS`) is the only one that is looked in. Without one, it is
    `./ckpts`, then the Hugging Face cache; a component may come from either. The demo's weights are part of osora;
    a named folder wins where it holds a transformer of the demo's file name, and what it lacks is the demo's.
    """
    files, named = settings.files, settings.runtime.weights
    if settings.model.name is not ModelName.DEMO:
        return find_released(files, named, model=settings.model.name)
    # OSORA_WEIGHTS is usually set for the released model: a folder without a demo in it must not hide the packaged one.
    folders = [packaged_demo()]
    if named is not None and (Path(named) / files.transformer).exists():
        folders.insert(0, Path(named))
    return _located(files, folders, model=ModelName.DEMO, looked_in=" and ".join(map(str, folders)))


def stamp_of(weights: Path | None) -> Stamp:
    """Return what changes with the file, or the files of a folder; empty where they cannot be read."""
    if weights is None:
        return ()
    try:
        files = sorted(path for path in weights.rglob("*") if path.is_file()) if weights.is_dir() else [weights]
        states = [(path.name, path.stat()) for path in files]
    except OSError:
        return ()
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def needed_components(settings: GenerateSettings) -> tuple[Component, ...]:
    """Return the parts whose weights a generation reads: saved latents are only decoded."""
    return ALL_COMPONENTS if settings.from_latents is None else (Component.VAE,)


def find_released(files: FileSettings, named: str | None, *, model: ModelName = ModelName.OPEN_SORA_V2) -> WeightFiles:
    """Return where a released model's weights are; see `find_weights`. A folder `named` is the only one searched."""
    if named is not None:
        return _located(files, [Path(named)], model=model, looked_in=named, download_folder=named)
    # The text encoders of all released models are the first one's.
    snapshots = map(hub_snapshot, dict.fromkeys((files.hub_repo, FileSettings().hub_repo)))
    folders = [Path(DEFAULT_FOLDER), *(folder for folder in snapshots if folder is not None)]
    looked_in = f"{Path(DEFAULT_FOLDER).absolute()} and the Hugging Face cache"
    return _located(files, folders, model=model, looked_in=looked_in, use_hub=True)


def download_command(kind: VAEKind, *, to: str) -> str:
    """Return the line that fetches the released model with this autoencoder; what is there already is not fetched."""
    return _download_line(_DOWNLOADS[kind], to=to)


def _download_line(name: str, *, to: str) -> str:
    place = "" if to == DEFAULT_FOLDER else f" --to {shlex.quote(to)}"
    return f"osora ckpt download {name}{place}"


def warn_of_missing(check: Callable[[], object], reporter: Reporter) -> None:
    """Warn of a file that `check` misses: a dry run plans, and the run would be refused for it."""
    try:
        check()
    except FileProblem as error:
        reporter.warn("; ".join(filter(None, (f"a run would be refused: {error.message}", error.hint))))


def warn_of_missing_weights(settings: GenerateSettings, reporter: Reporter) -> None:
    """Warn likewise of weights that `settings` need."""
    warn_of_missing(lambda: find_weights(settings).require(needed_components(settings)), reporter)


def find_autoencoder(kind: VAEKind, file: str, *, hub_repo: str | None, named: str | None) -> Path:
    """Return where the weights of an autoencoder are; a CheckpointError names where they were looked for.

    Args:
        file: the name of its file.
        hub_repo: the Hub repository in whose cache it may be; None: it is the demo's, which is part of osora.
        named: the folder to look in, and in no other; None: `./ckpts`, then the Hugging Face cache.
    """
    if named is not None:
        folders = [Path(named)]
    elif hub_repo is None:
        folders = [packaged_demo()]
    else:
        folders = [folder for folder in (Path(DEFAULT_FOLDER), hub_snapshot(hub_repo)) if folder is not None]
    for folder in folders:
        if (folder / file).exists():
            return folder / file
    hint = None if hub_repo is None else download_command(kind, to=named or DEFAULT_FOLDER)
    raise CheckpointError(
        f"weights of the autoencoder are missing: {file} (looked in {' and '.join(map(str, folders))})", hint=hint
    )


def packaged_demo() -> Path:
    """Return the folder of the demo model that comes with osora."""
    return Path(str(importlib.resources.files("opensora_cli") / "assets" / "demo"))


def hub_snapshot(repo: str) -> Path | None:
    """Return the folder in the Hugging Face cache that holds what was downloaded of `repo`; makes no request.

    By the documented layout of the cache and its variables: huggingface_hub itself takes longer to import than the rest
    of a wrong request takes to be refused.
    """
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


def _located(
    files: FileSettings,
    folders: Sequence[Path],
    *,
    model: ModelName,
    looked_in: str,
    download_folder: str = DEFAULT_FOLDER,
    use_hub: bool = False,
) -> WeightFiles:
    """Return the components, each from the first folder that has all of it."""
    paths: dict[Component, Path] = {}
    missing: dict[Component, tuple[str, ...]] = {}
    for component, name in _names(files).items():
        candidates = [folder / name for folder in folders]
        # Text encoders are often downloaded from their own repositories, whose names these are.
        own = hub_snapshot(name) if use_hub and component.is_folder else None
        if own is not None:
            candidates.append(own)
        lacking = {path: _lacking(component, path) for path in candidates}
        best = min(lacking, key=lambda path: len(lacking[path]))
        if lacking[best]:
            # Of the place where most of it is, so that half a download names what remains.
            missing[component] = tuple(f"{name}{file.removeprefix(str(best))}" for file in lacking[best])
        else:
            paths[component] = best
    return WeightFiles(
        model=model,
        paths=paths,
        missing=missing,
        looked_in=looked_in,
        download_folder=download_folder,
    )


def _names(files: FileSettings) -> dict[Component, str]:
    return {
        Component.TRANSFORMER: files.transformer,
        Component.VAE: files.vae,
        Component.T5: files.t5,
        Component.CLIP: files.clip,
    }


def _lacking(component: Component, path: Path) -> list[str]:
    if component is Component.T5:
        return missing_files(path, vocabularies=T5_VOCABULARIES)
    if component is Component.CLIP:
        return missing_files(path, vocabularies=CLIP_VOCABULARIES)
    return [] if path.exists() else [str(path)]


@dataclass(frozen=True, slots=True)
class ModelDecision:
    """Which model runs, and why."""

    name: ModelName
    reason: str

    def line(self) -> str:
        """Return it in one line."""
        return f"model: {self.name} ({self.reason})"


def choose_model(choice: ModelChoice, *, weights: str | None = None, device: str = "auto") -> ModelDecision:
    """Return the model to run.

    `auto` takes the released model where its weights, under their published names, and a CUDA device are there
    (`device` may rule that out), and the demo otherwise.
    """
    if choice is not ModelChoice.AUTO:
        return ModelDecision(ModelName(choice), "as asked")
    located = find_released(FileSettings(), weights)
    lacks_cuda = device == "cpu" or not _has_cuda()
    if located.complete and not lacks_cuda:
        folder = located.paths[Component.TRANSFORMER].parent
        return ModelDecision(ModelName.OPEN_SORA_V2, f"its weights are in {folder}, and there is a CUDA device")
    reasons = []
    if not located.complete:
        what = "the weights" if not located.paths else f"weights ({', '.join(located.missing)})"
        where = "" if weights is None else f" in {weights}"
        reasons.append(f"{what} of {located.model} are missing{where}")
    if lacks_cuda:
        reasons.append("the CPU was asked for" if device == "cpu" else "there is no CUDA device")
    return ModelDecision(ModelName.DEMO, " and ".join(reasons))


def choose_model_early(choice: ModelChoice, *, weights: str | None, device: str) -> ModelName | None:
    """Return the model that `choose_model` chooses; None where that takes torch to know."""
    if choice is not ModelChoice.AUTO:
        return ModelName(choice)
    if device == "cpu" or not find_released(FileSettings(), weights).complete:
        return ModelName.DEMO
    return None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
