"""Where results go: their names, and the checks that must not wait until hours of work are done."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from opensora_cli.core.exceptions import OutputError
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.media.names import file_stem
from opensora_cli.media.write import media_path

# Room for the result beside its latents: a compressed video rarely takes more than a tenth of a byte a pixel.
_BYTES_PER_PIXEL = 0.1
_HEADROOM = 2**20


@dataclass(frozen=True, slots=True)
class SampleFiles:
    """The files of one sample."""

    index: int
    seed: int
    target: Path
    """What was asked for."""
    media: Path
    """What is made: `target`, or the folder of a PNG sequence."""
    sidecar: Path | None
    """None where no metadata is wanted."""
    latents: Path | None
    """None where they are not saved, or come from a file already."""


def sample_files(plan: ExecutionPlan) -> tuple[SampleFiles, ...]:
    """Return the files of every sample: in a folder named after prompt and seed, several of one given name numbered."""
    output = plan.settings.output
    kind = output.resolved_format
    files = []
    for index in range(plan.num_samples):
        seed = plan.settings.sampling.seed + index
        named = Path(output.path)
        if output.named_format is None:
            # The seed tells samples apart: sample i is what seed + i makes on its own, so it has that name, too.
            target = named / f"{file_stem(plan.settings.prompt, seed=seed)}.{kind}"
        elif plan.num_samples > 1:
            target = named.with_stem(f"{named.stem}_{index:03d}")
        else:
            target = named
        media = media_path(target, format=kind, num_frames=plan.settings.video.num_frames)
        keeps_latents = output.save_latents and not plan.decodes_only
        files.append(
            SampleFiles(
                index=index,
                seed=seed,
                target=target,
                media=media,
                sidecar=media.with_name(f"{media.name}.json") if output.metadata else None,
                latents=target.with_name(f"{target.stem}.latents.safetensors") if keeps_latents else None,
            )
        )
    return tuple(files)


def check_outputs(files: tuple[SampleFiles, ...], plan: ExecutionPlan, *, create: bool) -> None:
    """Refuse what could only fail at the end: results that exist, a folder that cannot be written, a full disk.

    Args:
        files: of every sample.
        plan: what is made.
        create: whether to make the folder and try to write in it; else only look.

    Raises:
        OutputError: says which, and what to do.
    """
    overwrite = plan.settings.output.overwrite
    for sample in files:
        refuse_existing_results(sample, overwrite=overwrite)
        # Looked for even with --overwrite: a name that no file can have is to be refused as well.
        if sample.latents is not None and _exists(sample.latents) and not overwrite:
            raise OutputError(
                f"{sample.latents} is there from a run that did not finish",
                hint=f"go on with osora generate --from-latents {sample.latents}, or begin anew with --overwrite",
            )
    folder = files[0].media.parent
    if create:
        _make_writable(folder)
    else:
        _look_writable(folder)
    _check_space(folder, files, plan)


def refuse_existing_results(sample: SampleFiles, *, overwrite: bool) -> None:
    """Raise OutputError if the result or the sidecar of `sample` is there, unless it is to be replaced."""
    for path in filter(None, (sample.media, sample.sidecar)):
        if _exists(path) and not overwrite:
            raise OutputError(f"{path} exists already", hint="use --overwrite, another --seed or another --out")


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise OutputError(f"cannot write {path}: a part of this path is a file", hint="choose another --out") from error
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"cannot write {path}: {cause}", hint="choose another --out") from error
    return True


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"osora")
    except OSError as error:
        raise OutputError(
            f"cannot write in {folder}: {error.strerror or error}", hint="choose another folder with --out"
        ) from error


def _look_writable(folder: Path) -> None:
    parent = _nearest_existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"cannot write in {folder}", hint="choose another folder with --out")


def _check_space(folder: Path, files: tuple[SampleFiles, ...], plan: ExecutionPlan) -> None:
    latents = sum(plan.latent_bytes for sample in files if sample.latents)
    pixels = plan.height * plan.width * plan.settings.video.num_frames * len(files)
    needed = latents + int(pixels * _BYTES_PER_PIXEL) + _HEADROOM
    free = shutil.disk_usage(_nearest_existing(folder)).free
    if free < needed:
        raise OutputError(
            f"{folder} has {free / 2**20:.1f} MiB free, and latents and results need {needed / 2**20:.1f} MiB",
            hint="make room there, or choose another folder with --out",
        )


def _nearest_existing(folder: Path) -> Path:
    return next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path("/"))
