"""Functions for sampling: conditions, sizes, prompts and their refinement, result files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from opensora_cli.core.conditions import RELEASED_LENGTHS, condition_mode, reference_parts
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.files import write_bytes_atomic
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.generate.references import encode_references, read_references
from opensora_cli.engine.generate.refinement import ChatServer, refine
from opensora_cli.media.names import prompt_part
from opensora_cli.media.read import is_picture, read_picture, read_video
from opensora_cli.media.resize import fit_frames, to_uint8
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.config import NO_TILING
from opensora_cli.sampling import sizes
from opensora_cli.sampling import text as suffixes
from opensora_cli.sampling.conditioning import prepare_inference_condition as prepare_inference_condition
from opensora_cli.sampling.text import add_fps_info_to_text as add_fps_info_to_text


def collect_references_batch(
    reference_paths: Sequence[str],
    cond_type: str,
    model_ae: Autoencoder,
    image_size: tuple[int, int],
    is_causal: bool = False,
) -> list[list[Tensor] | None]:
    """Return each sample's encoded references (C,T,H,W), or None, for `prepare_inference_condition`.

    `reference_paths` are the files of each sample, separated by `;`. `image_size` is (height, width) in pixels.
    """
    mode, (height, width), ratio = condition_mode(cond_type), image_size, model_ae.grid.time_compression_ratio
    parts = reference_parts(mode, causal=is_causal, temporal_compression=ratio, lengths=RELEASED_LENGTHS)
    batch: list[list[Tensor] | None] = []
    for paths in reference_paths:
        files = [path.strip() for path in paths.split(";") if path.strip()]
        if not files or not mode.needs_reference:
            batch.append(None)
            continue
        references = read_references(files, mode, parts, height=height, width=width)
        batch.append(encode_references(references, model_ae, tiling=NO_TILING))
    return batch


def process_and_save(
    x: Tensor,
    batch: Mapping[str, Any],
    cfg: Any,
    sub_dir: str,
    generate_sampling_option: object,
    epoch: int,
    start_index: int,
    saving: bool = True,
) -> list[str]:
    """Save each clip of `x` (B,C,T,H,W), -1 to 1, with its prompt beside it, and return the names without endings.

    `batch` has lists `text`, and optionally `name` and `index`, to which `start_index` is added. `cfg` has `save_dir`,
    `dataset.data_path`, and by `get`: `save_prefix`, `fps_save`, `prompt_as_path`. `epoch` numbers the samples of a
    prompt, from 0. Without `saving`, only names are returned.
    """
    prefix, by_prompt = cfg.get("save_prefix", ""), cfg.get("prompt_as_path", False)
    names, table = batch.get("name", [None] * len(x)), Path(cfg.dataset.data_path).stem
    numbers = [start_index + int(number) for number in batch.get("index", range(len(x)))]
    paths = [
        get_save_path_name(cfg.save_dir, sub_dir, prefix, name, table, number, epoch, by_prompt, prompt)
        for prompt, name, number in zip(batch["text"], names, numbers, strict=True)
    ]
    for clip, path, prompt in zip(x, paths, batch["text"], strict=True) if saving else ():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(Path(f"{path}.txt"), prompt.encode("utf-8", "replace"))
        save_sample(clip, save_path=path, fps=cfg.get("fps_save", 16))
    return [Path(path).name for path in paths]


def get_save_path_name(
    save_dir: str | Path,
    sub_dir: str,
    save_prefix: str = "",
    name: str | None = None,
    fallback_name: str | None = None,
    index: int | None = None,
    num_sample_pos: int | None = None,
    prompt_as_path: bool = False,
    prompt: str | None = None,
) -> str:
    """Return the path of a result without its ending, from its prompt, its name, or its table's name and number."""
    if prompt_as_path:
        file = f"{prompt_part(prompt or '')}-{num_sample_pos or 0}"
    else:
        file = f"{save_prefix}{f'{fallback_name}_{index or 0:04d}' if name is None else name}"
        file += f"_{num_sample_pos}" if num_sample_pos else ""
    if Path(file).name != file:
        raise RequestError(f"name={file!r} is no name of a file")
    return str(Path(save_dir, sub_dir, file))


def save_sample(img: Tensor, save_path: str | Path, fps: float = 16) -> str:
    """Write a clip (C,T,H,W), -1 to 1, as MP4, a single frame as PNG, and return the path with its ending."""
    format_ = "png" if img.shape[1] == 1 else "mp4"
    return str(write_media([to_uint8(img)], f"{save_path}.{format_}", fps=fps, format=format_))


def rescale_image_by_path(path: str | Path, width: int, height: int) -> None:
    """Fit a PNG to a size, cut to its shape, and overwrite it."""
    if Path(path).suffix.lower() != ".png":
        raise RequestError(f"{path} must be a PNG, which is overwritten with a PNG")
    save_sample(read_from_path(path, (height, width)), Path(path).with_suffix(""))


def get_names_from_path(path: str | Path) -> str:
    """Return the name of a file without its ending."""
    return Path(path).stem


def get_image_size(resolution: str, ar_ratio: str, training: bool = True) -> tuple[int, int]:
    """Return (height, width) of a resolution and a ratio, or the nearest size if training's table lacks the ratio."""
    if not training:
        return sizes.image_size(resolution, ar_ratio)
    _, height, width = sizes.nearest_training_size(resolution, ar_ratio)
    return height, width


def read_from_path(path: str | Path, image_size: tuple[int, int], transform_name: str = "center") -> Tensor:
    """Return a picture or a video (C,T,height,width), -1 to 1, resized to cover the size and cut to it."""
    if transform_name not in ("center", "resize_crop"):
        raise RequestError(f"transform_name={transform_name!r} must be center or resize_crop")
    frames = read_picture(path)[None] if is_picture(path) else read_video(path).frames_THWC
    return fit_frames(frames, height=image_size[0], width=image_size[1])


def add_motion_score_to_text(text: Sequence[str], motion_score: int | str) -> list[str]:
    """Return each prompt with a motion score: a number, or `dynamic` for the answer of `refine_prompts`."""
    if motion_score == "dynamic":
        scores = refine_prompts(text, type="motion_score")
    elif str(motion_score).isdecimal():
        scores = [str(motion_score)] * len(text)
    else:
        raise RequestError(f"motion_score={motion_score!r} must be a number or dynamic")
    return [suffixes.add_motion_score_to_text([each], int(score))[0] for each, score in zip(text, scores, strict=True)]


def refine_prompts(
    prompts: Sequence[str], retry_times: int = 3, type: str = "t2v", image_paths: Sequence[str | None] | None = None
) -> list[str]:
    """Return each prompt refined by `refine_prompt`, with its picture."""
    images = image_paths or [None] * len(prompts)
    return [refine_prompt(prompt, retry_times, type, image) for prompt, image in zip(prompts, images, strict=True)]


def refine_prompt(prompt: str, retry_times: int = 3, type: str = "t2v", image_path: str | Path | None = None) -> str:
    """Return a prompt rewritten by a language model, or a motion score; see `refinement.refine`."""
    server = ChatServer(SilentReporter(), tries=retry_times)
    return refine(prompt, type, server=server, references=() if image_path is None else [image_path])
