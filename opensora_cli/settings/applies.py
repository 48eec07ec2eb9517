"""Conditions under which settings apply: one table for each command; and rules between pairs of settings.

Settings without effect are refused by these tables, and sidecars and request hashes have the settings that apply. A
setting without a row always applies. A condition is a function, or text: `KEY` (set, and neither false nor 0),
`KEY=VALUE`, `KEY=A|B`, `KEY!=VALUE` or `KEY>NUMBER`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from operator import attrgetter, getitem
from typing import Any, NamedTuple

from opensora_cli.core.conditions import CONTINUING, ConditionMode, Length, Source, condition_mode
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import Applies, Section, leaves, nested, shown
from opensora_cli.settings.components import OF_ALL_KINDS
from opensora_cli.settings.layers import Given

Condition = str | Callable[[Any], object]


def _row(
    keys: str, when: Condition, why: str = "", *, but: str = "", typed: bool = False, saved: bool = False
) -> Applies:
    """Return a row of a table.

    `why` is the fix, after the reason if `when` is a function. Without it, the settings are never refused. `typed`
    refuses them only where they are typed, and not in files. Sidecars always have those that are `saved`.
    """
    if isinstance(when, str):
        key, sign, _ = _parsed(when)
        why = why and f"{f'with {key}={{s.{key}}}' if sign else f'without {key}'}: {why}"
        when = partial(_holds, when)
    return Applies(keys, when, why, not typed, but, saved)


def _parsed(condition: str) -> list[str]:
    """Return the key, the sign and the value of a condition; `KEY` alone has neither sign nor value."""
    return [*re.split("(!=|=|>)", condition, maxsplit=1), "", ""][:3]


def _holds(condition: str, settings: Section) -> bool:
    return not condition or _find(settings, condition)[0]


def _find(settings: Section, condition: str) -> tuple[bool, str]:
    """Return whether a condition holds, and its setting as `KEY=VALUE`."""
    key, sign, value = _parsed(condition)
    found = attrgetter(key)(settings)
    if not sign:
        holds = bool(found)
    elif sign == ">":
        holds = found is not None and found > int(value)
    else:
        holds = (shown(found) in value.split("|")) == (sign == "=")
    return holds, f"{key}={shown(found)}"


def _never(settings: Any) -> bool:
    return False


def _mode(settings: Any) -> ConditionMode:
    return condition_mode(settings.condition.mode or "t2v", num_latent_frames=settings.num_latent_frames)


def _modes(settings: Any) -> tuple[ConditionMode, ...]:
    return (_mode(settings), CONTINUING) if settings.video.extend else (_mode(settings),)


def _is_named(settings: Any) -> bool:
    """Return whether resolution and aspect ratio give the size, and not height and width in pixels."""
    return settings.video.height is None or settings.video.width is None


def _takes_embedded_guidance(settings: Any) -> bool:
    picture = settings.picture
    return settings.model.guidance_embed or (picture.first and not picture.own_model and picture.model.guidance_embed)


def _vae(place: str, *, saved: bool = False) -> tuple[Applies, ...]:
    """Return the rows of an autoencoder. Keys outside the sections of other kinds belong to hunyuan."""
    kind, fix = f"{place}.kind", f"drop it, or use {place}.kind="
    return (
        _row(place, f"{kind}=hunyuan", f"{fix}hunyuan", but=" ".join(OF_ALL_KINDS), saved=saved),
        _row(f"{place}.dc_ae", f"{kind}=dc_ae", f"{fix}dc_ae", saved=saved),
        _row(f"{place}.flux_ae", f"{kind}=flux_ae", f"{fix}flux_ae", saved=saved),
    )


VAE = _vae("vae")
PARALLEL = (_row("parallel.fast_link_ranks", "parallel.all_to_all=hierarchical", "use hierarchical"),)

_SAVED_IF_CHANGED = """
video.extend prompts_at condition.seamless condition.continued loras compile precision.linear sampling.turbo
sampling.stop_at sampling.step_cache sampling.solver sampling.timesteps sampling.mean_guidance_of
sampling.guidance_interval memory.resident_blocks memory.limit memory.host_weights runtime.weights runtime.threads
"""
"""Settings that sidecars omit at their defaults, so that request hashes stay those of versions without them."""

_SAMPLED_WITH = """
prompt prompts_at negative_prompt refine prompt_suffix sampling condition model text loras draft picture compile
precision.linear runtime.attention video.extend output.save_state_every output.preview_every
"""
_GUIDED = """
negative_prompt sampling.guidance_scale sampling.image_guidance_scale sampling.text_oscillation
sampling.image_oscillation sampling.mean_guidance_of sampling.guidance_interval sampling.temporal_image_scaling
"""
_NEVER = "from_latents resume output.overwrite runtime.prompt_cache runtime.prompt_cache_limit sampling.fast"
"""Settings that are not recorded. Those that `sampling.fast` stands for are."""

GENERATE = (
    _row(_SAMPLED_WITH, "from_latents=none", "drop it, since latents are only decoded", typed=True, saved=True),
    *PARALLEL,
    *VAE,
    _row(_NEVER, _never),
    # The number of devices changes only rounding, unless they compress what they exchange.
    _row("parallel", _never, but="compression"),
    _row("parallel.compression", "parallel.compression!=none"),
    _row("files.turbo", "sampling.turbo"),
    _row("refine", _never, but="original"),
    _row("refine.original", "refine.original!=none"),
    _row(
        "refine.instructions refine.timeout_s refine.tries",
        lambda s: s.refine.is_on,
        "without --refine and --motion-score auto: drop it",
        typed=True,
    ),
    _row("draft", "draft.resolution", "give --draft-res, too"),
    *_vae("picture.vae", saved=True),
    _row("picture", "picture.first"),
    _row("picture.save", "picture.first", "give --t2i2v, too"),
    _row("picture.model picture.vae picture.files", "picture.own_model=false"),
    _row("prompts_at", "video.extend", "give --extend, too"),
    _row("video.height video.width", lambda s: not _is_named(s)),
    _row("video.resolutions video.aspect_ratios", _is_named),
    _row(
        "video.resolution video.aspect_ratio",
        _is_named,
        "with a width and height in pixels: drop it, or these",
        typed=True,
    ),
    _row("video.causal_lengths", lambda s: not s.vae.grid.is_causal, "with the causal {s.vae.kind}: drop it"),
    _row(
        _GUIDED,
        lambda s: not s.model.guidance_embed,
        "with the distilled model {s.model.name}, whose guidance is an input: "
        "drop it, or use --set sampling.embedded_guidance=X",
        typed=True,
    ),
    _row(
        "sampling.mean_guidance_of",
        lambda s: s.sampling.oscillates,
        "on guidance that does not oscillate: drop it, or set sampling.text_oscillation=true",
    ),
    _row(
        "sampling.flow_shift",
        lambda s: s.sampling.timesteps is None,
        "on sampling.timesteps: drop one of them",
        saved=True,
    ),
    _row("sampling.embedded_guidance", _takes_embedded_guidance),
    _row(
        "sampling.image_guidance_scale sampling.image_oscillation",
        lambda s: any(mode.needs_reference for mode in _modes(s)),
    ),
    _row("sampling.temporal_image_scaling", lambda s: _mode(s).gives_pictures),
    _row("condition.seamless", "condition.mode=none|i2v_loop", "use i2v_loop, or drop it"),
    _row("condition.references condition.fit", lambda s: _mode(s).needs_reference),
    _row("condition.ref_fps", lambda s: _mode(s).source is Source.VIDEO),
    _row("condition.video_latent_frames", lambda s: any(mode.length is Length.VIDEO for mode in _modes(s))),
    _row("condition.easy_latent_frames", lambda s: _mode(s).length is Length.EASY),
    _row("vae.sample_size vae.dc_ae.spatial_tile_size vae.flux_ae.tile_size", "vae.spatial_tiling"),
    _row("vae.sample_tsize vae.dc_ae.temporal_tile_size", "vae.temporal_tiling"),
    _row(
        "vae.tile_overlap_factor vae.dc_ae.tile_overlap_factor vae.flux_ae.tile_overlap_factor",
        lambda s: s.vae.spatial_tiling or s.vae.temporal_tiling,
    ),
    _row("vae.temporal_tiling", lambda s: s.vae.temporal_tiling or s.vae.kind != "flux_ae"),
    _row("output.save_state_every", "output.save_latents", "drop it", saved=True),
    _row("memory.resident_blocks memory.host_weights", "memory.offload=auto|blocks", "use blocks"),
    _row("precision.tf32", "runtime.device!=cpu", "use none", saved=True),
)

SAME_FOR_ALL_RUNS = _row(
    "prompt prompts_at negative_prompt refine prompt_suffix text loras model files video condition picture draft "
    "from_latents resume output sampling.seed sampling.num_samples sampling.stop_at sampling.turbo "
    "runtime.weights runtime.model_choice runtime.device runtime.prompt_cache runtime.prompt_cache_limit "
    "parallel.gpus parallel.devices parallel.nnodes parallel.data_parallel_degree",
    _never,
)
"""Settings that `bench-generate --try` cannot change: what the video shows, and where it is made."""


def _for(keys: str, applies: Callable[[Any], object], fix: str, *, typed: bool = False) -> Applies:
    return _row(keys, applies, f"with target={{s.target}}: {fix}", typed=typed)


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
    _row("data.fps_max data.fit", "data.table", "give it, too", typed=True),
    _row("data.prefetch", "data.workers", "give it, too", typed=True),
    _row("train_vae.discriminator", "train_vae.discriminator.weight", "give it, too", but="weight", typed=True),
    _row("validation", "validation.every", "give it, too", but="every", typed=True),
    _row("samples", "samples.every", "give it, too", but="every", typed=True),
    _row(
        "train_vae.perceptual_files",
        lambda s: s.trains_transformer or s.train_vae.perceptual_weight,
        "with train_vae.perceptual_weight=0: use 0.5, or no files",
    ),
    _row(
        "train_vae.kl_weight",
        lambda s: s.trains_transformer or not s.train_vae.decoder_only,
        "with train_vae.decoder_only=true: use 0",
    ),
    _row(
        "train_vae.kl_weight",
        lambda s: s.trains_transformer or s.vae.kind != "dc_ae",
        "with vae.kind=dc_ae, which has no posterior: use 0",
    ),
    _row("lora", "lora.rank", "set it, as in lora.rank=16", but="rank"),
    _row("optimizer.muon_learning_rate", "optimizer.name=muon", "use muon", typed=True),
    _row("optimizer.decay_steps", "optimizer.schedule!=cosine", "use 0, since it falls from the end of the warm-up on"),
    _row("optimizer.initial_learning_rate", "optimizer.warmup_steps!=0", "use 0, or more warmup_steps"),
    _row(
        "optimizer.final_learning_rate",
        lambda s: s.optimizer.decay_steps or s.optimizer.schedule == "cosine",
        "with optimizer.decay_steps=0: use 0, or more decay_steps",
    ),
    _row("precision.tf32", "device!=cpu", "use none"),
    _row(
        "memory.checkpoint_double_blocks memory.checkpoint_single_blocks",
        "memory.checkpointing!=none",
        "use full, selective or offload",
    ),
    _row("memory.resident_blocks memory.host_weights", "memory.offload!=none", "use blocks"),
)


def refuse_without_effect(settings: Section, overrides: Mapping[str, Given]) -> None:
    """Raise RequestError for the first setting that was typed and does not apply.

    A file may have such a setting because another file may extend it.
    """
    for row in settings.applies:
        if not row.why or row.is_refused or row.when(settings):
            continue
        for key in (key for key in overrides if key in row.covered(type(settings))):
            value, source = shown(overrides[key].value), overrides[key].source
            why, _, fix = row.why.format(s=settings).rpartition(": ")
            # `--set` and `--try NAME` name a key beside the value.
            is_flag = re.fullmatch(r"--(?!set$)[\w-]+", source)
            setting = f"{source} {value}" if is_flag else f"{key}={value} (from {source})"
            raise RequestError(f"{setting} has no effect {why}", hint=fix)


def used_settings(settings: Section) -> dict[str, Any]:
    """Return the settings that took part as JSON values. The others may change without changing the result.

    Settings that depend on the machine are omitted where they are unset. `settings` have their condition mode.
    """
    rows = [row for row in settings.applies if not row.is_recorded and not row.when(settings)]
    unused = frozenset[str]().union(*(row.covered(type(settings)) for row in rows))
    values, if_changed = settings.model_dump(mode="json"), _SAVED_IF_CHANGED.split()
    return nested(
        {
            key: reduce(getitem, key.split("."), values)
            for key, _, is_default in leaves(settings)
            if key not in unused and not (is_default and key in if_changed)
        }
    )


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
        first, named = _find(settings, pair.first)
        if first and _holds(pair.only, settings) and not _holds(pair.second, settings):
            yield f"{named} needs {pair.second}: {pair.fix}"
    for pair in conflicts:
        (first, named), (second, other) = _find(settings, pair.first), _find(settings, pair.second)
        if first and second and _holds(pair.only, settings):
            yield f"{named} does not go with {other}: {pair.fix}"
