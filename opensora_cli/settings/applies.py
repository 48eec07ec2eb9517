"""Conditions under which settings apply: one table for each command; and rules between pairs of settings.

Settings without effect are refused by these tables, and sidecars and request hashes have the settings that apply. A
setting without a row always applies. A condition is `KEY` (set, and neither false nor 0), `KEY=VALUE`, `KEY=A|B`,
`KEY!=VALUE` or `KEY>NUMBER`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from opensora_cli.core.conditions import CONTINUING, ConditionMode, Length, Source, condition_mode
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import Applies, Section, shown
from opensora_cli.settings.components import OF_ALL_KINDS
from opensora_cli.settings.explain import Given

_CONDITION = re.compile(r"(?P<key>[\w.]+)((?P<sign>!=|=|>)(?P<value>.+))?")


def _if(keys: str, condition: str, fix: str = "", *, but: str = "", is_recorded: bool = False) -> Applies:
    """Return a row for settings that apply while a condition holds. Without a fix they are never refused."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None
    why = f"with {match['key']}={{s.{match['key']}}}" if match["sign"] else f"without {match['key']}"
    return Applies(
        keys, lambda s: _holds(s, condition), f"{why}: {fix}" if fix else "", but=but, is_recorded=is_recorded
    )


def _typed(row: Applies) -> Applies:
    """Return a row that files may ignore: its settings are refused only where they are typed."""
    return row._replace(is_refused=False)


def _mode(settings: Any) -> ConditionMode:
    return condition_mode(settings.condition.mode or "t2v", num_latent_frames=settings.num_latent_frames)


def _modes(settings: Any) -> tuple[ConditionMode, ...]:
    """Return the condition modes of all segments."""
    return (_mode(settings), CONTINUING) if settings.video.extend else (_mode(settings),)


def _is_in_pixels(settings: Any) -> bool:
    return settings.video.height is not None and settings.video.width is not None


def _takes_embedded_guidance(settings: Any) -> bool:
    picture = settings.picture
    return settings.model.guidance_embed or (picture.first and not picture.own_model and picture.model.guidance_embed)


def _vae(place: str) -> tuple[Applies, ...]:
    """Return the rows of an autoencoder. Keys outside the sections of other kinds belong to hunyuan."""
    kind, fix = f"{place}.kind", f"drop it, or use {place}.kind="
    return (
        _if(place, f"{kind}=hunyuan", f"{fix}hunyuan", but=" ".join(OF_ALL_KINDS)),
        _if(f"{place}.dc_ae", f"{kind}=dc_ae", f"{fix}dc_ae"),
        _if(f"{place}.flux_ae", f"{kind}=flux_ae", f"{fix}flux_ae"),
    )


VAE = _vae("vae")
PARALLEL = (_if("parallel.fast_link_ranks", "parallel.all_to_all=hierarchical", "use hierarchical"),)

_RECORDED_IF_CHANGED = (
    "video.extend prompts_at condition.seamless condition.continued loras compile precision.linear sampling.turbo "
    "sampling.stop_at sampling.step_cache sampling.solver sampling.timesteps sampling.mean_guidance_of "
    "sampling.guidance_interval memory.resident_blocks memory.limit memory.host_weights runtime.weights "
    "runtime.threads"
)
"""Settings that sidecars omit at their defaults, so that request hashes stay those of versions without them."""

_SAMPLED_WITH = (
    "prompt prompts_at negative_prompt refine prompt_suffix sampling condition model text loras draft picture compile "
    "precision.linear runtime.attention video.extend output.save_state_every output.preview_every"
)
_GUIDED = (
    "negative_prompt sampling.guidance_scale sampling.image_guidance_scale sampling.text_oscillation "
    "sampling.image_oscillation sampling.mean_guidance_of sampling.guidance_interval sampling.temporal_image_scaling"
)
_NEVER = "from_latents resume output.overwrite runtime.prompt_cache runtime.prompt_cache_limit sampling.fast"
"""Settings that are not recorded. Those that `sampling.fast` stands for are."""

GENERATE = (
    _typed(_if(_SAMPLED_WITH, "from_latents=none", "drop it, since latents are only decoded", is_recorded=True)),
    *PARALLEL,
    *VAE,
    Applies(_NEVER, lambda s: False),
    # The number of devices changes only rounding, unless they compress what they exchange.
    Applies("parallel", lambda s: False, but="compression"),
    _if("parallel.compression", "parallel.compression!=none"),
    _if("files.turbo", "sampling.turbo"),
    Applies("refine", lambda s: False, but="original"),
    _if("refine.original", "refine.original!=none"),
    _typed(
        Applies(
            "refine",
            lambda s: s.refine.is_on,
            "without --refine and --motion-score auto: drop it",
            but="prompt motion_score original",
        )
    ),
    _if("draft", "draft.resolution", "give --draft-res, too"),
    *(row._replace(is_recorded=True) for row in _vae("picture.vae")),
    _if("picture", "picture.first"),
    _if("picture.save", "picture.first", "give --t2i2v, too"),
    _if("picture.model picture.vae picture.files", "picture.own_model=false"),
    _if("prompts_at", "video.extend", "give --extend, too"),
    Applies("video.height video.width", _is_in_pixels),
    Applies("video.resolutions video.aspect_ratios", lambda s: not _is_in_pixels(s)),
    _typed(
        Applies(
            "video.resolution video.aspect_ratio",
            lambda s: not _is_in_pixels(s),
            "with a width and height in pixels: drop it, or these",
        )
    ),
    Applies("video.causal_lengths", lambda s: not s.vae.grid.is_causal, "with the causal {s.vae.kind}: drop it"),
    _typed(
        Applies(
            _GUIDED,
            lambda s: not s.model.guidance_embed,
            "with the distilled model {s.model.name}, whose guidance is an input: "
            "drop it, or use --set sampling.embedded_guidance=X",
        )
    ),
    Applies(
        "sampling.mean_guidance_of",
        lambda s: s.sampling.oscillates,
        "on guidance that does not oscillate: drop it, or set sampling.text_oscillation=true",
    ),
    Applies(
        "sampling.flow_shift",
        lambda s: s.sampling.timesteps is None,
        "on sampling.timesteps: drop one of them",
        is_recorded=True,
    ),
    Applies("sampling.embedded_guidance", _takes_embedded_guidance),
    Applies(
        "sampling.image_guidance_scale sampling.image_oscillation",
        lambda s: any(mode.needs_reference for mode in _modes(s)),
    ),
    Applies("sampling.temporal_image_scaling", lambda s: _mode(s).gives_pictures),
    _if("condition.seamless", "condition.mode=none|i2v_loop", "use i2v_loop, or drop it"),
    Applies("condition.references condition.fit", lambda s: _mode(s).needs_reference),
    Applies("condition.ref_fps", lambda s: _mode(s).source is Source.VIDEO),
    Applies("condition.video_latent_frames", lambda s: any(mode.length is Length.VIDEO for mode in _modes(s))),
    Applies("condition.easy_latent_frames", lambda s: _mode(s).length is Length.EASY),
    _if("vae.sample_size vae.dc_ae.spatial_tile_size vae.flux_ae.tile_size", "vae.spatial_tiling"),
    _if("vae.sample_tsize vae.dc_ae.temporal_tile_size", "vae.temporal_tiling"),
    Applies(
        "vae.tile_overlap_factor vae.dc_ae.tile_overlap_factor vae.flux_ae.tile_overlap_factor",
        lambda s: s.vae.spatial_tiling or s.vae.temporal_tiling,
    ),
    Applies("vae.temporal_tiling", lambda s: s.vae.temporal_tiling or s.vae.kind != "flux_ae"),
    _if("output.save_state_every", "output.save_latents", "drop it", is_recorded=True),
    _if("memory.resident_blocks memory.host_weights", "memory.offload=auto|blocks", "use blocks"),
    _if("precision.tf32", "runtime.device!=cpu", "use none", is_recorded=True),
)

SAME_FOR_ALL_RUNS = Applies(
    "prompt prompts_at negative_prompt refine prompt_suffix text loras model files video condition picture draft "
    "from_latents resume output sampling.seed sampling.num_samples sampling.stop_at sampling.turbo "
    "runtime.weights runtime.model_choice runtime.device runtime.prompt_cache runtime.prompt_cache_limit "
    "parallel.gpus parallel.devices parallel.nnodes parallel.data_parallel_degree",
    lambda s: False,
)
"""Settings that `bench-generate --try` cannot change: what the video shows, and where it is made."""


def _for(keys: str, applies: Callable[[Any], object], fix: str) -> Applies:
    """Return a row for settings of some training objectives."""
    return Applies(keys, applies, f"with target={{s.target}}: {fix}")


_TRANSFORMER = attrgetter("trains_transformer")

TRAIN = (
    *PARALLEL,
    *VAE,
    _typed(_for("train_vae", lambda s: not s.trains_transformer, "use target=vae")),
    _typed(_for("train_distill", lambda s: s.objective.has_teacher, "use target=distill")),
    _for("train_mmdit.masked_loss", lambda s: not s.objective.has_teacher, "drop it"),
    _typed(
        _for(
            "train_distill.critic_steps train_distill.critic_learning_rate",
            lambda s: s.objective.has_critic or not s.objective.has_teacher,
            "use target=dmd",
        )
    ),
    _typed(
        _for(
            "weights model text train_mmdit lora memory compile samples watching.peak_tflops",
            _TRANSFORMER,
            "use target=mmdit",
        )
    ),
    _for("strategy compile lora.rank", _TRANSFORMER, "drop it, since no transformer is trained"),
    _typed(_if("data.fps_max data.fit", "data.table", "give it, too")),
    _typed(_if("data.prefetch", "data.workers", "give it, too")),
    _typed(_if("train_vae.discriminator", "train_vae.discriminator.weight", "give it, too", but="weight")),
    _typed(_if("validation", "validation.every", "give it, too", but="every")),
    _typed(_if("samples", "samples.every", "give it, too", but="every")),
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
    _if("lora", "lora.rank", "set it, as in lora.rank=16", but="rank"),
    _typed(_if("optimizer.muon_learning_rate", "optimizer.name=muon", "use muon")),
    _if("optimizer.decay_steps", "optimizer.schedule!=cosine", "use 0, since it falls from the end of the warm-up on"),
    _if("optimizer.initial_learning_rate", "optimizer.warmup_steps!=0", "use 0, or more warmup_steps"),
    Applies(
        "optimizer.final_learning_rate",
        lambda s: s.optimizer.decay_steps or s.optimizer.schedule == "cosine",
        "with optimizer.decay_steps=0: use 0, or more decay_steps",
    ),
    _if("precision.tf32", "device!=cpu", "use none"),
    _if(
        "memory.checkpoint_double_blocks memory.checkpoint_single_blocks",
        "memory.checkpointing!=none",
        "use full, selective or offload",
    ),
    _if("memory.resident_blocks memory.host_weights", "memory.offload!=none", "use blocks"),
)


def refuse_without_effect(settings: Section, overrides: Mapping[str, Given]) -> None:
    """Raise RequestError for the first setting that was typed and does not apply.

    A file may have such a setting because another file may extend it.
    """
    for row in settings.applies:
        if row.why and not row.is_refused and not row.when(settings):
            for key, given in overrides.items():
                if row.covers(key):
                    why, _, fix = row.why.format(s=settings).rpartition(": ")
                    # `--set` and `--try NAME` name a key beside the value.
                    is_flag = re.fullmatch(r"--(?!set$)[\w-]+", given.source)
                    value, source = shown(given.value), given.source
                    setting = f"{source} {value}" if is_flag else f"{key}={value} (from {source})"
                    raise RequestError(f"{setting} has no effect {why}", hint=fix)


def used_settings(settings: Section) -> dict[str, Any]:
    """Return the settings that took part as JSON values. The others may change without changing the result.

    Settings that depend on the machine are omitted where they are unset. `settings` have their condition mode.
    """
    rows = [row for row in settings.applies if not row.is_recorded and not row.when(settings)]
    if_changed = _RECORDED_IF_CHANGED.split()

    def used(section: Section, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            key, child = f"{prefix}{name}", getattr(section, name)
            if isinstance(child, Section):
                if inside := used(child, value, f"{key}."):
                    found[name] = inside
            elif not any(row.covers(key) for row in rows) and (
                key not in if_changed or child != type(section).model_fields[name].default
            ):
                found[name] = value
        return found

    return used(settings, settings.model_dump(mode="json"), "")


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
        if first and _holds(settings, pair.only) and not _holds(settings, pair.second):
            yield f"{named} needs {pair.second}: {pair.fix}"
    for pair in conflicts:
        (first, named), (second, other) = _find(settings, pair.first), _find(settings, pair.second)
        if first and second and _holds(settings, pair.only):
            yield f"{named} does not go with {other}: {pair.fix}"


def _holds(settings: Section, condition: str) -> bool:
    return not condition or _find(settings, condition)[0]


def _find(settings: Section, condition: str) -> tuple[bool, str]:
    """Return whether a condition holds, and its setting as `KEY=VALUE`."""
    match = _CONDITION.fullmatch(condition)
    assert match is not None
    found, sign, value = attrgetter(match["key"])(settings), match["sign"], match["value"]
    if sign is None:
        holds = bool(found)
    elif sign == ">":
        holds = found is not None and found > int(value)
    else:
        holds = (shown(found) in value.split("|")) == (sign == "=")
    return holds, f"{match['key']}={shown(found)}"
