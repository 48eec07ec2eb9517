"""Files of a chain of jobs: names by the hash of its request, pictures made first, and sidecars."""

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.hardware import versions
from opensora_cli.engine.components.weights import stamp_of
from opensora_cli.engine.generate.chain import Chain, alone
from opensora_cli.engine.generate.outputs import SampleFiles, find_target, is_begun, read_made, sample_files
from opensora_cli.engine.generate.plan import DRAFT, PICTURE, Plan
from opensora_cli.engine.generate.ranks import ALONE, Ranks
from opensora_cli.engine.generate.request import picture_path
from opensora_cli.engine.generate.sample import REQUEST_KEY, open_latents
from opensora_cli.engine.generate.text import full_prompt
from opensora_cli.media.results import refuse_existing, sidecar_path
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.generate_sections import NameFrom
from opensora_cli.settings.load import SIDECAR_SCHEMA


def choose_outputs(chain: Chain, *, claims: ExitStack | None = None, ranks: Ranks = ALONE) -> tuple[SampleFiles, ...]:
    """Return the files of every sample, which rank 0 chooses. `claims` are those of `find_target`."""
    settings, chosen = chain.settings, list[SampleFiles]()
    if ranks.is_main:
        request = request_hashes(chain)
        for index in range(settings.num_samples):
            of_sample = request(settings.sampling.seed + index, settings.output_format)
            chosen.append(find_target(settings, index, of_sample, claims=claims))
    known = ranks.same([(each.number, each.made_before, str(each.saved or ""), each.saved_steps) for each in chosen])
    if ranks.is_main:
        return tuple(chosen)
    for index, (number, made_before, saved, steps) in enumerate(known):
        files, path = sample_files(settings, index, number=number), Path(saved) if saved else None
        chosen.append(replace(files, made_before=made_before, saved=path, saved_steps=steps))
    return tuple(chosen)


def request_hashes(chain: Chain) -> Callable[[int, str], str]:
    """Return a function from the seed of a sample and the format of its file to the hash of its request.

    The hash covers everything that decides the bits of a sample: settings, references, weights, versions, device and
    dtype. The hash excludes the places of files, and how work is divided and offloaded, which changes only rounding.
    Weights are large: their size and time of change stand for their content.
    """
    plan, picture = chain.video, chain.find(PICTURE)
    settings, latents = plan.settings, plan.settings.from_latents
    saved_request = None if latents is None else _request_of_latents(settings, latents)
    references = [] if plan.decodes_only else [_hash(path) for path in settings.condition.references]
    of_picture = None if picture is None else request_hashes(alone(picture))
    used = used_settings(settings)
    others = "files", "runtime", "output", "condition", "refine", "picture"
    parts = {
        **{key: value for key, value in used.items() if key not in others},
        "memory": settings.memory.fp8_storage,
        "loras": [[lora.scale, lora.sha256] for lora in plan.loras],
        "condition": {**used["condition"], "references": references},
        "latents": None if latents is None else _hash(latents),
        "weights": {part: stamp_of(path) for part, path in plan.weight_paths.items()},
        "attention": settings.runtime.attention,
        "device": [plan.hardware.device.type, plan.hardware.dtype_name],
        "versions": versions(),
    }
    # A result that stops early has another name, and the same request finishes it.
    sampling = {key: value for key, value in used["sampling"].items() if key != "stop_at"}

    def request(seed: int, format: str) -> str:
        if saved_request is not None:
            return saved_request
        values = {**parts, "sampling": {**sampling, "seed": seed, "num_samples": 1}, "format": format}
        if of_picture is not None:
            values["picture"] = [settings.picture.save, of_picture(seed, MediaFormat.PNG)]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    return request


def _request_of_latents(settings: GenerateSettings, latents: str) -> str | None:
    """Return the request that made saved latents if decoding them with `settings` makes its result."""
    saved = open_latents(latents)
    if saved.steps is not None:
        raise RequestError(
            f"{latents} was saved after step {saved.steps} of {settings.sampling.num_inference_steps}",
            hint=f"continue with osora generate --from {shlex.quote(latents)}",
        )

    def deciding(settings: GenerateSettings) -> dict[str, Any]:
        places = "files", "runtime", "output", "memory", "parallel", "refine"
        return {key: value for key, value in used_settings(settings).items() if key not in places}

    try:
        is_the_same = deciding(GenerateSettings.model_validate(dict(saved.settings))) == deciding(settings)
    except ValueError:  # Settings of another version.
        return None
    return saved.request_sha256 if is_the_same else None


def _hash(path: str) -> str:
    try:
        with Path(path).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""  # Reading the file reports the error.


def picture_files(chain: Chain, files: Sequence[SampleFiles]) -> list[SampleFiles]:
    """Return the files of the pictures of some samples; none if the chain makes no pictures."""
    plan = chain.find(PICTURE)
    if plan is None:
        return []
    request = request_hashes(alone(plan))
    pictures = []
    for sample in files:
        path, sha256 = picture_path(sample.target), request(sample.seed, MediaFormat.PNG)
        own = replace(sample, target=path, media=path, sidecar=sample.sidecar and sidecar_path(path))
        is_made = not chain.settings.output.overwrite and read_made(own).get(REQUEST_KEY) == sha256
        own = replace(own, latents=None, saved=None, saved_steps=None, request_sha256=sha256, made_before=is_made)
        pictures.append(own)
    return pictures


def refuse_pictures(chain: Chain, files: Sequence[SampleFiles]) -> None:
    """Raise OutputError if a picture beside a video would replace another file."""
    output = chain.settings.output
    if output.overwrite:
        return
    for sample in files:
        if output.last_frame and not is_begun(sample):
            refuse_existing(sample.last_frame, None)
    for picture in picture_files(chain, files) if chain.settings.picture.save else ():
        if not picture.made_before:
            refuse_existing(picture.media, picture.sidecar)


def sample_settings(plan: Plan, sample: SampleFiles) -> GenerateSettings:
    """Return the settings that make this sample alone again, in any working folder."""
    settings = plan.settings
    output = settings.output
    changes: dict[str, object] = {
        "runtime.model_choice": settings.model.name,
        "sampling.seed": sample.seed,
        "sampling.num_samples": 1,
        "condition.references": tuple(str(Path(path).absolute()) for path in settings.condition.references),
        "from_latents": None,
        "resume": None,
        # The number of devices changes only rounding; compression changes more.
        "parallel": {"compression": settings.parallel.compression},
        # A later run must not replace files without being asked.
        "output.overwrite": False,
    }
    if plan.loras:
        # The hash detects another file of the same name. The adapter of `sampling.turbo` comes last, and is no file
        # that the user named.
        changes["loras"] = tuple(
            {"path": str(lora.path.absolute()), "scale": lora.scale, "sha256": lora.sha256}
            for lora in plan.loras[: len(settings.loras)]
        )
    if settings.num_samples > 1 and (output.named_format is not None or output.name_from is NameFrom.PROMPT):
        changes["output.path"] = str(sample.target)
    return settings.replace(changes)


def sidecar_document(
    chain: Chain, sample: SampleFiles, *, num_bytes: int, figures: Mapping[str, object]
) -> dict[str, object]:
    """Return the sidecar of a sample whose media has `num_bytes`. `figures` are measurements of its run."""
    plan, draft = chain.video, chain.find(DRAFT)
    settings, exchange = plan.settings, plan.planned_exchange
    of_draft = draft and {name: getattr(draft, name) for name in ("height", "width", "model_evaluations")}
    return {
        "schema": SIDECAR_SCHEMA,
        "file": sample.media.name,
        "bytes": num_bytes,
        REQUEST_KEY: sample.request_sha256,
        "prompt": settings.prompt,
        "original_prompt": settings.refine.original,
        "full_prompt": full_prompt(settings),
        "negative_prompt": settings.negative_prompt,
        "seed": sample.seed,
        "model": settings.model.name,
        "condition_mode": plan.mode.name,
        "height": plan.height,
        "width": plan.width,
        "num_frames": plan.num_frames,
        "fps": settings.video.fps,
        "model_evaluations": chain.model_evaluations,
        "picture_file": picture_path(sample.target).name if settings.picture.save else None,
        "draft": of_draft and {**of_draft, "skipped_steps": plan.start},
        **figures,
        "device": str(plan.hardware.device),
        "device_name": plan.hardware.device_name,
        "dtype": plan.hardware.dtype_name,
        "threads": plan.threads and plan.threads.to_json(),
        "mesh": asdict(plan.mesh),
        "exchange": exchange and exchange.to_json(),
        "offload": asdict(plan.offload),
        "attention": plan.attention and plan.attention.to_json(),
        "versions": versions(),
        "settings": used_settings(sample_settings(plan, sample)),
    }
