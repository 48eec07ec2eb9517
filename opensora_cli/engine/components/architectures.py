"""Models from settings: configurations, modules without weights, loaded autoencoders and text encoders, and counts.

Other code knows only the interface `Autoencoder`. A new autoencoder is a line in `AUTOENCODERS`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opensora_cli.checkpoint.load import PlannedTensor, load_into_module, plan_tensors
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import plain
from opensora_cli.engine.components.weights import Component, Stamp, WeightFiles, stamp_of
from opensora_cli.memory.streaming import StreamingFigures, stream_blocks
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.clip import ClipTextModel, clip_weights
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import KEPT_IN_FP32, LAYERS, T5Model, t5_weights
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.models.vae.config import Tiling
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.flux_ae import FluxAE
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.resample import lay_out_kernels
from opensora_cli.settings.components import ModelSettings, VAEKind, VAESettings
from opensora_cli.settings.generate import GenerateSettings

AUTOENCODERS: Mapping[VAEKind, type[Autoencoder]] = {
    VAEKind.HUNYUAN: HunyuanVAE,
    VAEKind.DC_AE: DCAE,
    VAEKind.FLUX_AE: FluxAE,
}

STREAMED_LAYERS = 2
"""Layers on the device at a time: one computes while the next one is copied."""

_WEIGHTS = tuple(
    f"{stem}{suffix}" for stem in ("model.safetensors", "pytorch_model.bin") for suffix in ("", ".index.json")
)

_SCALE_METADATA = "osora.latent_scale"
_SET_VALUES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_"} | {name for name in vars(nn.init) if name.endswith("_")}
)


@contextmanager
def on_meta() -> Iterator[None]:
    """Create new modules on the meta device inside the block, and skip the slow initialization of their weights."""
    with torch.device("meta"), _NoValues():
        yield


class _NoValues(TorchFunctionMode):
    """Skips functions that set the values of tensors."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, unless it sets values."""
        if getattr(func, "__name__", "") in _SET_VALUES:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def mmdit_config(settings: ModelSettings) -> MMDiTConfig:
    """Return the configuration of the transformer."""
    return MMDiTConfig(**{name: getattr(settings, name) for name in MMDiTConfig.model_fields})


def transformer_on_meta(settings: ModelSettings) -> MMDiT:
    """Return the transformer without weights."""
    with on_meta():
        return MMDiT(mmdit_config(settings))


def with_depth(config: MMDiTConfig, most: int) -> MMDiTConfig:
    """Return the configuration with at most `most` blocks in each stack."""
    return config.replace(
        {"depth": min(config.depth, most), "depth_single_blocks": min(config.depth_single_blocks, most)}
    )


@lru_cache(maxsize=16)
def one_block_of_each(config: MMDiTConfig) -> MMDiT:
    """Return the transformer without weights, with at most one block in each stack."""
    with on_meta():
        return MMDiT(with_depth(config, 1))


def count_parameters(settings: GenerateSettings, weights: WeightFiles) -> dict[Component, int]:
    """Return the number of parameters of every component; a missing text encoder counts as the released one."""
    return {
        Component.TRANSFORMER: _count_transformer(settings.model),
        Component.VAE: _count_vae(settings.vae),
        Component.T5: T5Sizes.of(weights.paths.get(Component.T5)).parameters,
        Component.CLIP: ClipSizes.of(weights.paths.get(Component.CLIP)).parameters,
    }


# One run is planned several times.
@lru_cache(maxsize=16)
def _count_transformer(settings: ModelSettings) -> int:
    config = mmdit_config(settings)
    model = one_block_of_each(config)
    blocks = [
        (stack.count, model.get_submodule(f"{stack.module_path}.0")) for stack in repeated_blocks(config) if stack.count
    ]
    return _count(model) + sum((count - 1) * _count(block) for count, block in blocks)


@lru_cache(maxsize=16)
def _count_vae(settings: VAESettings) -> int:
    return _count(autoencoder_on_meta(settings))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def new_autoencoder(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder with random weights, on torch's default device."""
    return AUTOENCODERS[settings.kind](settings.sizes)


def autoencoder_on_meta(settings: VAESettings) -> Autoencoder:
    """Return the chosen autoencoder without weights."""
    with on_meta():
        return new_autoencoder(settings)


def load_autoencoder(
    settings: VAESettings,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[int], None] | None = None,
) -> Autoencoder:
    """Return the chosen autoencoder for inference, in `dtype`. `advance` is called with the bytes of each tensor."""
    autoencoder = autoencoder_on_meta(settings)
    load_into_module(autoencoder, path, device=device, dtype=dtype, advance=advance)
    lay_out_kernels(autoencoder, device)
    return autoencoder.requires_grad_(False).eval()


def vae_tiling(settings: VAESettings) -> Tiling:
    """Return the axes along which the autoencoder cuts tiles."""
    return Tiling(spatial=settings.spatial_tiling, temporal=settings.temporal_tiling)


def count_decoder_tiles(latent_shape: tuple[int, int, int, int], settings: VAESettings) -> int:
    """Return how often the decoder runs for latents of this (C, T, H, W)."""
    _, grid = settings.sizes.tile_grids()
    return grid.count(latent_shape[1:], vae_tiling(settings))


def decodes_in_chunks(settings: VAESettings) -> bool:
    """Return whether the decoder can process the frames of a clip in chunks."""
    return AUTOENCODERS[settings.kind].decodes_in_chunks


def scale_metadata(settings: VAESettings) -> dict[str, str]:
    """Return the metadata of a transformer's file that states the scale of its training latents."""
    return {_SCALE_METADATA: " ".join(settings.scale)}


def require_same_scale(transformer: Path, settings: VAESettings) -> None:
    """Raise CheckpointError if the metadata of a transformer's file states latents of another scale."""
    if transformer.suffix != ".safetensors" or not transformer.is_file():
        return
    stated, ours = open_checkpoint(transformer).metadata.get(_SCALE_METADATA), " ".join(settings.scale)
    if stated is not None and stated != ours:
        raise CheckpointError(
            f"{transformer} was trained on latents with {plain(stated)}, and the settings have {ours}",
            hint=f"use {' '.join(f'--set {each}' for each in plain(stated).split())}",
        )


def load_t5(
    folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype, layers_on_host: bool = False
) -> T5Encoder:
    """Return the T5 encoder in a folder; it pads or cuts every text to `max_length` tokens.

    With `layers_on_host` its layers stay on the CPU, for `streamed_layers`: mapped from the file, in the dtype of the
    file if they are `cast_later`. Errors are those of `T5Encoder.reader`, and CheckpointError for unfit weights.
    """
    tokenizer = T5Encoder.reader(folder, max_length=max_length).tokenizer
    with on_meta():
        model = T5Model(T5Sizes.of(folder))
    layers = [f"{LAYERS}.*"] if layers_on_host else []
    load_into_module(
        model,
        _weights(folder),
        device=device,
        dtype=dtype,
        convert=t5_weights,
        keep_on_host=layers,
        keep_dtype=layers if cast_later(device, dtype) else [],
        keep_fp32=[KEPT_IN_FP32] if dtype is torch.float16 else [],
    )
    return T5Encoder(model=model, tokenizer=tokenizer, max_length=max_length, device=device)


def load_clip(folder: Path, *, max_length: int, device: torch.device, dtype: torch.dtype) -> ClipEncoder:
    """Return the text tower of the CLIP in a folder, with the errors of `ClipEncoder.reader`; see `load_t5`."""
    tokenizer = ClipEncoder.reader(folder, max_length=max_length).tokenizer
    with on_meta():
        model = ClipTextModel(ClipSizes.of(folder))
    load_into_module(model, _weights(folder), device=device, dtype=dtype, convert=clip_weights)
    return ClipEncoder(model=model, tokenizer=tokenizer, max_length=max_length, device=device)


def streamed_layers(
    t5: T5Encoder, *, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[StreamingFigures]:
    """Return a context that copies the layers of `load_t5` to the device, each for one pass."""
    return stream_blocks(
        [t5.blocks],
        device=device,
        resident=STREAMED_LAYERS,
        source="mapped",
        dtype=dtype if cast_later(device, dtype) else None,
    )


def cast_later(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether layers are cast at use: on a CPU, but not to float16, where some weights stay float32."""
    return device.type == "cpu" and dtype is not torch.float16


def stored_t5_dtype(folder: Path) -> torch.dtype | None:
    """Return the most frequent dtype of the layers in the files of a T5, or None if the files cannot be read."""
    try:
        layers = [tensor for tensor in text_tensors(folder, stamp_of(folder)) if tensor.key.startswith(LAYERS)]
    except CheckpointError:
        return None
    sizes: Counter[torch.dtype] = Counter()
    for tensor in layers:
        sizes[tensor.dtype] += tensor.numel
    return sizes.most_common(1)[0][0] if sizes else None


@lru_cache(maxsize=16)
def text_tensors(folder: Path, stamp: Stamp) -> tuple[PlannedTensor, ...]:
    """Return the tensors in the folder of a text encoder with this stamp. Raises CheckpointError for broken weights."""
    return plan_tensors(_weights(folder), dtype=torch.float32)


def _weights(folder: Path) -> Path:
    """Return the file of weights, or its index, in the order of preference of transformers."""
    return next((folder / name for name in _WEIGHTS if (folder / name).exists()), folder)
