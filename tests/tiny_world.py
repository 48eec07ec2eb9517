"""Every file that a generation reads, in small: random weights under the released names, and references to give.

Used by the tests of the engine and by those of the command line.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from opensora_cli.core.choices import QKV
from opensora_cli.core.progress import SilentReporter, StageProgress
from opensora_cli.engine.components.architectures import mmdit_config, new_autoencoder
from opensora_cli.media.write import write_media
from opensora_cli.models.mmdit.layout import HeadSizes, plan_layout
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.registry import DEMO, FLUX1_DEV, OPEN_SORA_V2, OPEN_SORA_V2_DC_AE
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, load_generate_settings

WORDS = [
    *("<pad>", "</s>", "<unk>", "<s>", "a", "boat", "on", "the", "sea", "raining", "at", "night", ",", ".", "24"),
    *("fps", "4", "motion", "score", "12"),
]
_IDS = {word: number for number, word in enumerate(WORDS)}
MAX_LENGTH = 16

SIZES = {
    "model.hidden_size": "32",
    "model.num_heads": "2",
    "model.axes_dim": "4,6,6",
    "model.depth": "1",
    "model.depth_single_blocks": "1",
    "model.context_in_dim": "16",
    "model.vec_in_dim": "16",
    "text.t5_max_length": str(MAX_LENGTH),
    "text.clip_max_length": str(MAX_LENGTH),
}
HUNYUAN_SIZES = {"vae.norm_num_groups": "2", "vae.layers_per_block": "1"}
RELEASED_SIZES = {
    **SIZES,
    **HUNYUAN_SIZES,
    "model.in_channels": "16",
    "vae.latent_channels": "4",
    "vae.block_out_channels": "4,4,8,8",
    # Two tiles a side and in time at the sizes used here.
    "vae.sample_size": "32",
    "vae.sample_tsize": "32",
}
TINY_DC_AE = {
    "model.in_channels": "8",
    "vae.dc_ae.latent_channels": "8",
    "vae.dc_ae.block_types": "res,res,efficientvit",
    "vae.dc_ae.width_list": "8,8,32",
    "vae.dc_ae.encoder_depth_list": "1,1,1",
    "vae.dc_ae.decoder_depth_list": "1,1,1",
    "vae.dc_ae.temporal": "true,true,false",
}
DC_AE_SIZES = {
    **SIZES,
    **TINY_DC_AE,
    # Tiles of 4 latents a side and 4 latent frames.
    "vae.dc_ae.spatial_tile_size": "16",
    "vae.dc_ae.temporal_tile_size": "16",
}
FLUX_SIZES = {
    **SIZES,
    "model.in_channels": "16",
    "vae.flux_ae.z_channels": "4",
    "vae.flux_ae.ch": "32",
    "vae.flux_ae.ch_mult": "1,1",
    "vae.flux_ae.num_res_blocks": "1",
}
DEMO_SIZES = {
    **SIZES,
    **HUNYUAN_SIZES,
    "vae.block_out_channels": "4,4,8",
    "vae.sample_size": "64",
    "vae.sample_tsize": "16",
    "video.height": "64",
    "video.width": "64",
    "video.resolutions": "64px,128px",
    "video.max_frames": "17",
    "condition.video_latent_frames": "2",
    "condition.easy_latent_frames": "3",
    "picture.resolution": "64px",
}


class RecordingReporter(SilentReporter):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.stages: list[str] = []
        self.totals: dict[str, int | None] = {}
        self.advanced: dict[str, int] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def advance(self, amount: int = 1) -> None:
        self.advanced[self.stages[-1]] = self.advanced.get(self.stages[-1], 0) + amount

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "it") -> Iterator[StageProgress]:
        self.stages.append(name)
        self.totals[name] = total
        yield self


@dataclass(frozen=True)
class World:
    """Folders of weights, and reference files."""

    released: Path
    """Those of the video model and of the one for pictures."""
    dc_ae: Path
    demo: Path
    picture: Path
    other_picture: Path
    video: Path
    """Eighty frames at 24 fps."""


_TWO_STEPS = {"sampling.num_inference_steps": "2"}
_SHRUNK: dict[str, tuple[str, dict[str, str]]] = {
    OPEN_SORA_V2: (
        "released",
        {**RELEASED_SIZES, **_TWO_STEPS, "video.height": "16", "video.width": "32", "video.num_frames": "9"},
    ),
    # Six latent frames of 4 x 8, in tiles.
    OPEN_SORA_V2_DC_AE: (
        "dc_ae",
        {
            **DC_AE_SIZES,
            **_TWO_STEPS,
            "picture.first": "false",
            "video.height": "16",
            "video.width": "32",
            "video.num_frames": "24",
        },
    ),
    # 12 x 20 latents.
    FLUX1_DEV: ("released", {**FLUX_SIZES, **_TWO_STEPS, "video.height": "24", "video.width": "40"}),
    DEMO: ("demo", {**DEMO_SIZES, **_TWO_STEPS, "video.num_frames": "17"}),
}
"""Model -> folder of the world with its weights, and what shrinks its preset."""


def _overrides(model: str, world: World, output: Path) -> dict[str, str]:
    folder, sizes = _SHRUNK[model]
    return {**sizes, "runtime.weights": str(getattr(world, folder)), "output.path": str(output)}


def _settings(
    model: str, world: World, output: Path, *, prompt: str = "raining, sea", **changes: object
) -> GenerateSettings:
    """Return the shrunken preset of a model; keys of `changes` have `__` for the dot."""
    values = {**_overrides(model, world, output), "prompt": prompt}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    given = {key: Given(value, "the test") for key, value in values.items() if value is not None}
    return load_generate_settings(GenerateRequest(overrides=given), model=model)


released_overrides = partial(_overrides, OPEN_SORA_V2)
released_settings = partial(_settings, OPEN_SORA_V2)
dc_ae_settings = partial(_settings, OPEN_SORA_V2_DC_AE)
flux_settings = partial(_settings, FLUX1_DEV)
demo_settings = partial(_settings, DEMO)


def picture_first_settings(world: World, output: Path, **changes: object) -> GenerateSettings:
    """Return `released_settings` that make a picture of 16 x 64 first, with the model of `flux_settings`."""
    sizes = {key: value for key, value in FLUX_SIZES.items() if not key.startswith("text.")}
    picture = {f"picture.{key}".replace(".", "__"): value for key, value in sizes.items()}
    first = {"picture__first": "true", "picture__resolution": "32px", **picture}
    return released_settings(world, output, **{**first, **changes})


def make_world(folder: Path) -> World:
    """Write everything below `folder`."""
    world = World(
        released=folder / "released",
        dc_ae=folder / "dc_ae",
        demo=folder / "demo",
        picture=folder / "picture.png",
        other_picture=folder / "other.png",
        video=folder / "video.mp4",
    )
    for model in (OPEN_SORA_V2, OPEN_SORA_V2_DC_AE, DEMO):
        settings = _settings(model, world, folder)
        files, root = settings.files, getattr(world, _SHRUNK[model][0])
        root.mkdir()
        save_weights(root / files.transformer, MMDiT(mmdit_config(settings.model)), dtype=torch.bfloat16)
        save_weights(root / files.vae, new_autoencoder(settings.vae))
        save_t5(root / files.t5)
        save_clip(root / files.clip)
    pictures = flux_settings(world, folder)
    save_weights(world.released / pictures.files.transformer, MMDiT(mmdit_config(pictures.model)), fused=True)
    save_weights(world.released / pictures.files.vae, new_autoencoder(pictures.vae))
    (world.demo / "vocabulary.json").write_text(json.dumps({"places": ["sea", "desert"], "weathers": ["raining"]}))
    write_media([moving_frames(1)], world.picture, fps=24, format="png")
    write_media([moving_frames(1).flip(1)], world.other_picture, fps=24, format="png")
    write_media([moving_frames(80)], world.video, fps=24, format="mp4")
    return world


def moving_frames(count: int, *, height: int = 24, width: int = 40) -> torch.Tensor:
    """Return a smooth pattern that drifts, (T, H, W, 3) uint8."""
    t, y, x = torch.meshgrid(torch.arange(count), torch.arange(height), torch.arange(width), indexing="ij")
    channels = [torch.sin((x + 2 * t) / 9), torch.cos(y / 7), torch.sin((x + y + t) / 11)]
    return ((torch.stack(channels, dim=-1) + 1) * 127.5).to(torch.uint8)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def weights_of(latents: Path) -> dict[str, Given]:
    """Return the weights that made saved latents as they are given again; nothing where the file does not say."""
    try:
        with safe_open(latents, "pt") as file:
            settings = json.loads(file.metadata()["settings"])
        return {"runtime.weights": Given(settings["runtime"]["weights"], "--weights")}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def save_weights(
    path: Path, module: torch.nn.Module, *, dtype: torch.dtype = torch.float32, fused: bool = False
) -> None:
    """Write random weights under the module's own names, which are the released ones; none is zero.

    A `fused` transformer has q, k and v in one tensor, and its rotary pairs interleaved.
    """
    generator = torch.Generator().manual_seed(5)
    state = {
        key: (tensor + 0.05 * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for key, tensor in module.state_dict().items()
    }
    if fused:
        sizes = HeadSizes.of_config(cast(MMDiT, module).config)
        shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
        plan = plan_layout(shapes, sizes, qkv=QKV.FUSED, reorder=False)
        state = {name: torch.cat([state[piece.key] for piece in pieces]) for name, pieces in plan.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)


def save_t5(folder: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "feed_forward_proj": "gated-gelu"}
    save_tokenizer(folder, "$A </s>", model_type="t5", **sizes)
    torch.manual_seed(0)
    save_weights(folder / "model.safetensors", T5Model(T5Sizes.of(folder)))


def save_clip(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": MAX_LENGTH, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    save_tokenizer(folder, "<s> $A </s>", model_type="clip_text_model", **sizes)
    torch.manual_seed(0)
    save_weights(folder / "model.safetensors", ClipTextModel(ClipSizes.of(folder)))


def save_tokenizer(
    folder: Path, template: str | None, *, words: Mapping[str, int] = MappingProxyType(_IDS), **config: object
) -> None:
    """Write a lower-casing tokenizer with a vocabulary of `words`, and the configuration of a model if there is one.

    Without a template, a text has no end token.
    """
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = Tokenizer(models.WordLevel(dict(words), unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*special.values()])
    if template is not None:
        ends = [(word, words[word]) for word in ("<s>", "</s>") if word in words]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if config:
        (folder / "config.json").write_text(json.dumps({"vocab_size": len(words), **config}))
