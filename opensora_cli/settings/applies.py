"""Conditions under which settings apply: one table for each command; and rules between pairs of settings.

Settings without effect are refused by these tables, and sidecars and request hashes have the settings that apply. A
setting without a row always applies.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import attrgetter, getitem
from typing import Any, NamedTuple

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import Applies, Section, find_setting, leaves, nested, shown
from opensora_cli.settings.components import OF_ALL_KINDS
from opensora_cli.settings.layers import Given


def _never(settings: Any) -> bool:
    return False


def _vae(place: str) -> tuple[Applies, ...]:
    """Return the rows of an autoencoder. Keys outside the sections of other kinds belong to hunyuan."""
    kind, fix = f"{place}.kind", f"drop it, or use {place}.kind="
    return (
        Applies(place, f"{kind}=hunyuan", f"{fix}hunyuan", but=" ".join(OF_ALL_KINDS)),
        Applies(f"{place}.dc_ae", f"{kind}=dc_ae", f"{fix}dc_ae"),
        Applies(f"{place}.flux_ae", f"{kind}=flux_ae", f"{fix}flux_ae"),
    )


VAE = _vae("vae")
PARALLEL = (Applies("parallel.fast_link_ranks", "parallel.all_to_all=hierarchical", "use hierarchical"),)

_SAMPLED_WITH = """
prompt prompts_at negative_prompt refine prompt_suffix sampling condition model text loras draft picture compile
precision.linear runtime.attention video.extend output.save_state_every output.preview_every
"""
_GUIDED = """
negative_prompt sampling.guidance_scale sampling.image_guidance_scale sampling.text_oscillation
sampling.image_oscillation sampling.mean_guidance_of sampling.guidance_interval sampling.temporal_image_scaling
"""
_NEVER = "from_latents resume output.overwrite sampling.fast"
"""Settings that are not recorded. Those that `sampling.fast` stands for are."""

GENERATE = (
    Applies(_SAMPLED_WITH, "from_latents=none", "drop it, since latents are only decoded", typed=True, saved=True),
    *PARALLEL,
    *VAE,
    Applies(_NEVER, _never),
    # The number of devices changes only rounding, unless they compress what they exchange.
    Applies("parallel", _never, but="compression"),
    Applies("parallel.compression", "parallel.compression!=none"),
    Applies("files.turbo", "sampling.turbo"),
    Applies("refine", _never, but="original"),
    Applies("refine.original", "refine.original!=none"),
    Applies("draft", "draft.resolution", "give --draft-res, too"),
    *_vae("picture.vae"),
    Applies("picture", "picture.first"),
    Applies("picture.save", "picture.first", "give --t2i2v, too"),
    Applies("picture.model picture.vae picture.files", "picture.own_model=false"),
    Applies("prompts_at", "video.extend", "give --extend, too"),
    Applies(
        "video.resolution video.aspect_ratio",
        lambda s: None in (s.video.height, s.video.width),
        "with a width and height in pixels: drop it, or these",
        typed=True,
    ),
    Applies(
        "video.picture_frames",
        lambda s: s.video.max_frames > 1 and (s.video.num_frames == 1 or (s.picture.first and s.picture.own_model)),
        "unless a model of videos makes a picture: drop it, or use --num-frames 1",
        typed=True,
    ),
    Applies("video.causal_lengths", lambda s: not s.vae.grid.is_causal, "with the causal {s.vae.kind}: drop it"),
    Applies(
        _GUIDED,
        lambda s: not s.model.guidance_embed,
        "with the distilled model {s.model.name}, whose guidance is an input: "
        "drop it, or use --set sampling.embedded_guidance=X",
        typed=True,
    ),
    Applies(
        "sampling.mean_guidance_of",
        lambda s: s.sampling.oscillates,
        "on guidance that does not oscillate: drop it, or set sampling.text_oscillation=true",
    ),
    Applies("sampling.flow_shift", lambda s: s.sampling.timesteps is None, "on sampling.timesteps: drop one of them"),
    Applies("condition.seamless", "condition.mode=none|i2v_loop", "use i2v_loop, or drop it"),
    Applies("output.save_state_every", "output.save_latents", "drop it"),
    Applies("memory.resident_blocks memory.host_weights", "memory.offload=auto|blocks", "use blocks"),
)


def _is_guided(s: Any) -> bool:
    return s.sampling.guidance_scale != 1 or (_gives_frames(s) and s.sampling.image_guidance_scale != 1)


def _gives_frames(s: Any) -> bool:
    return bool(s.condition.references or s.picture.first or s.video.extend)


def _comes(s: Any, every: int | None) -> bool:
    steps: int = s.sampling.num_inference_steps
    return (every or 0) <= steps


_FEW_STEPS = "in so few steps"
WARNED = (
    Applies("negative_prompt", _is_guided, "without guidance (sampling.guidance_scale=1)"),
    Applies("sampling.image_guidance_scale sampling.image_oscillation", _gives_frames, "without given frames"),
    Applies("condition.fit", lambda s: s.condition.references, "without references"),
    Applies("output.preview_every", lambda s: _comes(s, s.output.preview_every), _FEW_STEPS),
    Applies("output.save_state_every", lambda s: _comes(s, s.output.save_state_every), _FEW_STEPS),
)
"""Settings of a generation that may be typed without effect, such as by a script for many requests."""

SAME_FOR_ALL_RUNS = Applies(
    "prompt prompts_at negative_prompt refine prompt_suffix text loras model files video condition picture draft "
    "from_latents resume output sampling.seed sampling.num_samples sampling.stop_at sampling.turbo "
    "runtime.weights runtime.model_choice runtime.device "
    "parallel.gpus parallel.devices parallel.nnodes parallel.data_parallel_degree",
    _never,
)
"""Settings that `bench-generate --try` cannot change: what the video shows, and where it is made."""


def _for(keys: str, applies: Callable[[Any], object], fix: str, *, typed: bool = False) -> Applies:
    return Applies(keys, applies, f"with target={{s.target}}: {fix}", typed=typed)


_TRANSFORMER = attrgetter("trains_transformer")

TRAIN = (
    *PARALLEL,
    *VAE,
    _for("train_vae", lambda s: not s.trains_transformer, "use target=vae", typed=True),
    _for("train_distill", lambda s: s.objective.has_teacher, "use target=distill", typed=True),
    _for("train_mmdit.masked_loss", lambda s: not s.objective.has_teacher, "drop it"),
    _for(
        "train_distill.critic_steps train_distill.critic_learning_rate",
        lambda s: s.objective.has_critic or not s.objective.has_teacher,
        "use target=dmd",
        typed=True,
    ),
    _for(
        "weights model text train_mmdit lora memory compile samples watching.peak_tflops",
        _TRANSFORMER,
        "use target=mmdit",
        typed=True,
    ),
    _for("strategy compile lora.rank", _TRANSFORMER, "drop it, since no transformer is trained"),
    Applies("data.fps_max data.fit", "data.table", "give it, too", typed=True),
    Applies("data.prefetch", "data.workers", "give it, too", typed=True),
    Applies("train_vae.discriminator", "train_vae.discriminator.weight", "give it, too", but="weight", typed=True),
    Applies("validation", "validation.every", "give it, too", but="every", typed=True),
    Applies("samples", "samples.every", "give it, too", but="every", typed=True),
    Applies(
        "train_vae.perceptual_files",
        lambda s: s.trains_transformer or s.train_vae.perceptual_weight,
        "with train_vae.perceptual_weight=0: use 0.5, or no files",
    ),
    Applies(
        "train_vae.kl_weight",
        lambda s: s.trains_transformer or not s.train_vae.decoder_only,
        "with train_vae.decoder_only=true: use 0",
    ),
    Applies(
        "train_vae.kl_weight",
        lambda s: s.trains_transformer or s.vae.kind != "dc_ae",
        "with vae.kind=dc_ae, which has no posterior: use 0",
    ),
    Applies("lora", "lora.rank", "set it, as in lora.rank=16", but="rank"),
    Applies("optimizer.muon_learning_rate", "optimizer.name=muon", "use muon", typed=True),
    Applies("optimizer.decay_steps", "optimizer.schedule!=cosine", "use 0, as it falls after the warm-up"),
    Applies(
        "memory.checkpoint_double_blocks memory.checkpoint_single_blocks",
        "memory.checkpointing!=none",
        "use full, selective or offload",
    ),
    Applies("memory.resident_blocks memory.host_weights", "memory.offload!=none", "use blocks"),
)


def refuse_without_effect(settings: Section, overrides: Mapping[str, Given]) -> None:
    """Raise RequestError for the first setting that was typed and does not apply.

    A file may have such a setting because another file may extend it.
    """
    for row in settings.applies:
        if not row.why or not row.typed or row.holds(settings):
            continue
        for key in (key for key in overrides if key in row.covered(type(settings))):
            why, _, fix = row.reason(settings).rpartition(": ")
            raise RequestError(f"{_as_given(key, overrides[key])} has no effect {why}", hint=fix)


def warnings_without_effect(settings: Section, overrides: Mapping[str, Given]) -> Iterator[str]:
    """Yield a line for each setting of a generation that was typed and changes nothing, but is not refused."""
    for row in WARNED:
        for key in (key for key in overrides if key in row.covered(type(settings)) and not row.holds(settings)):
            yield f"{_as_given(key, overrides[key])} has no effect {row.reason(settings)}"


def _as_given(key: str, given: Given) -> str:
    """Return a setting as it was given."""
    value = shown(given.value)
    # `--set` and `--try NAME` name a key beside the value.
    is_flag = re.fullmatch(r"--(?!set$)[\w-]+", given.source)
    return f"{given.source} {value}" if is_flag else f"{key}={value} (from {given.source})"


def used_settings(settings: Section) -> dict[str, Any]:
    """Return the settings that may have taken part, as JSON values. The others do not change the result."""
    rows = [row for row in settings.applies if not row.saved and not row.holds(settings)]
    unused = frozenset[str]().union(*(row.covered(type(settings)) for row in rows))
    values = settings.model_dump(mode="json")
    return nested({key: reduce(getitem, key.split("."), values) for key, *_ in leaves(settings) if key not in unused})


class Pair(NamedTuple):
    """Rule between two settings: one needs the other, or they do not go together."""

    first: str
    second: str
    fix: str
    only: str = ""
    """Condition of the rule. Empty means always."""


def pair_problems(settings: Section, *, needs: Iterable[Pair] = (), conflicts: Iterable[Pair] = ()) -> Iterator[str]:
    """Yield one line for each broken rule."""
    for pair in needs:
        (first, named), (second, _) = find_setting(settings, pair.first), find_setting(settings, pair.second)
        if first and not second and find_setting(settings, pair.only)[0]:
            yield f"{named} needs {pair.second}: {pair.fix}"
    for pair in conflicts:
        (first, named), (second, other) = find_setting(settings, pair.first), find_setting(settings, pair.second)
        if first and second and find_setting(settings, pair.only)[0]:
            yield f"{named} does not go with {other}: {pair.fix}"
