"""The files of a run: their names, checks that must not wait until hours of work are done, sidecars, saved latents."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import opensora_cli
from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.core.files import nearest_existing, write_bytes_atomic, write_json_atomic
from opensora_cli.engine.components.hardware import tf32_in_use, versions
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.text import full_prompt
from opensora_cli.media.names import file_stem
from opensora_cli.media.write import media_path
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import SIDECAR_SCHEMA
from opensora_cli.settings.used import used_settings

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
            # Named by seed: sample i is what seed + i makes on its own, so it has that name, too.
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

    With `create` the folder is made and a file tried in it; else it is only looked at. An OutputError names what is
    wrong, and what to do.
    """
    overwrite = plan.settings.output.overwrite
    for sample in files:
        refuse_existing_results(sample, overwrite=overwrite)
        # Looked for even with --overwrite: a name that no file can have is to be refused as well.
        if sample.latents is not None and _exists(sample.latents) and not overwrite:
            raise OutputError(
                f"{sample.latents} is there from a run that did not finish",
                hint=f"go on with osora generate --from-latents {sample.latents}, or start again with --overwrite",
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
    parent = nearest_existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"cannot write in {folder}", hint="choose another folder with --out")


def _check_space(folder: Path, files: tuple[SampleFiles, ...], plan: ExecutionPlan) -> None:
    latents = sum(plan.latent_bytes for sample in files if sample.latents)
    pixels = plan.height * plan.width * plan.settings.video.num_frames * len(files)
    needed = latents + int(pixels * _BYTES_PER_PIXEL) + _HEADROOM
    free = shutil.disk_usage(nearest_existing(folder)).free
    if free < needed:
        raise OutputError(
            f"{folder} has {free / 2**20:.1f} MiB free, and latents and results need {needed / 2**20:.1f} MiB",
            hint="make room there, or choose another folder with --out",
        )


def sample_settings(plan: ExecutionPlan, sample: SampleFiles) -> GenerateSettings:
    """Return the settings that make this one sample again, with its own seed, from whatever folder they are used in."""
    settings = plan.settings
    output = settings.output
    changes: dict[str, object] = {
        "runtime.model_choice": settings.model.name.value,
        "sampling.seed": sample.seed,
        "sampling.num_samples": 1,
        "condition.references": tuple(str(Path(path).absolute()) for path in settings.condition.references),
        "from_latents": None,
        # However many devices there are then: they change no more than rounding.
        "parallel": {},
        # To replace files is never carried over to a later run.
        "output.overwrite": False,
    }
    if plan.loras:
        # By their contents too: a file of the same name may be another one by then.
        changes["loras"] = tuple(
            {"path": str(lora.path.absolute()), "scale": lora.scale, "sha256": lora.sha256} for lora in plan.loras
        )
    if output.named_format is not None and plan.num_samples > 1:
        changes["output.path"] = str(sample.target)
    return settings.replace(changes)


def write_sidecar(
    plan: ExecutionPlan,
    sample: SampleFiles,
    *,
    timings_s: Mapping[str, float],
    peak_memory_gib: Mapping[str, float],
    given_frames_psnr_db: float | None,
) -> None:
    """Write the sidecar of `sample`, if one is wanted; an OutputError if that fails.

    `timings_s` maps stages to seconds, of the whole run for loading and text; `peak_memory_gib` is
    `hardware.peak_memory_gib` of the run so far.
    """
    if sample.sidecar is None:
        return
    settings = plan.settings
    document = {
        "schema": SIDECAR_SCHEMA,
        "file": sample.media.name,
        "prompt": settings.prompt,
        "full_prompt": full_prompt(settings),
        "negative_prompt": settings.negative_prompt,
        "seed": sample.seed,
        "model": settings.model.name.value,
        "condition_mode": plan.mode.name,
        "height": plan.height,
        "width": plan.width,
        "num_frames": settings.video.num_frames,
        "fps": settings.video.fps,
        "model_evaluations": plan.evaluations_per_sample,
        "given_frames_psnr_db": None if given_frames_psnr_db is None else round(given_frames_psnr_db, 2),
        "device": str(plan.hardware.device),
        "device_name": plan.hardware.device_name,
        "dtype": plan.hardware.dtype_name,
        "tf32": tf32_in_use(plan.hardware.device),
        "timings_s": {stage: round(seconds, 3) for stage, seconds in timings_s.items()},
        **peak_memory_gib,
        "mesh": asdict(plan.mesh),
        "offload": asdict(plan.offload),
        "attention": None if plan.attention is None else plan.attention.to_json(),
        "versions": versions(),
        "settings": used_settings(sample_settings(plan, sample)),
    }
    write_json_atomic(sample.sidecar, document)


def media_tags(plan: ExecutionPlan, sample: SampleFiles) -> dict[str, str]:
    """Return the metadata of the media file itself; empty where none is wanted.

    No time and no place: the same request makes the same bytes.
    """
    if not plan.settings.output.metadata:
        return {}
    return {
        "prompt": plan.settings.prompt,
        "seed": str(sample.seed),
        "model": plan.settings.model.name.value,
        "software": f"osora {opensora_cli.__version__}",
    }


LATENTS_SCHEMA = "osora.latents/1"
_KEY = "latents"


@dataclass(frozen=True, slots=True)
class SavedLatents:
    """What such a file holds."""

    latents_CTHW: torch.Tensor
    """Scaled, as the autoencoder decodes them; on the CPU."""
    settings: Mapping[str, object]
    """Sections as in `GenerateSettings.model_dump(mode="json")`, for this one sample."""


def save_latents(path: Path, latents_CTHW: torch.Tensor, settings: GenerateSettings) -> None:
    """Write the latents of one sample, with the settings that made them; whole or not at all (OutputError)."""
    metadata = {"schema": LATENTS_SCHEMA, "settings": json.dumps(settings.model_dump(mode="json"))}
    write_bytes_atomic(path, save({_KEY: latents_CTHW.detach().cpu().contiguous()}, metadata=metadata))


def load_latents(path: str | Path) -> SavedLatents:
    """Read a file of `save_latents`; a CheckpointError if it is missing, truncated, or not such a file."""
    hint = "--from-latents takes the .latents.safetensors file of an unfinished run"
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist or is no file", hint=hint)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("schema") != LATENTS_SCHEMA or _KEY not in set(file.keys()):
                raise CheckpointError(f"{path} holds no latents of osora", hint=hint)
            return SavedLatents(file.get_tensor(_KEY), _settings_in(path, metadata))
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} is truncated or no safetensors file: {reason}", hint=hint) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _settings_in(path: str | Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(metadata["settings"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} does not say which settings made it") from error
    return settings
