"""Task and clips of a run, and its transformer with the first weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora_cli.checkpoint.load import read_weights
from opensora_cli.core.device import torch_dtype
from opensora_cli.core.progress import Reporter
from opensora_cli.data.batches import ClipSource
from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.attention import AttentionPlan, AttentionUse, choose_attention
from opensora_cli.engine.encode.clip_cache import ClipCache, fill_cache
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.engine.train.early import find_first_weights
from opensora_cli.engine.train.lora import add_lora, first_adapter, open_first_adapter, read_adapter
from opensora_cli.engine.train.memory import plan_activations, stack_paths, weights_dtype
from opensora_cli.engine.train.objectives import TokenWeights, find_objective
from opensora_cli.engine.train.parallelize import parallelize
from opensora_cli.engine.train.trainer import Task
from opensora_cli.memory.eight_bit import Fp8Linear
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.train import TrainSettings
from opensora_cli.settings.train_sections import WeightOffload

# Models that make only pictures lack these weights, which then start from zero.
_MAY_BE_MISSING = ("cond_in.*",)


def build_task(
    settings: TrainSettings,
    *,
    distribution: Distribution,
    clips: ClipCache | None = None,
    token_weights: TokenWeights | None = None,
    reporter: Reporter,
) -> Task:
    """Return the task of the objective, ready for training: this rank's part, on its device."""
    # Layers take their first weights from torch's global generator, whose state is the caller's.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        task = find_objective(settings).build(
            settings, distribution=distribution, clips=clips, token_weights=token_weights, reporter=reporter
        )
    plan = plan_activations(settings)
    recipe = partial(parallelize, activations=plan, compiles=settings.compile, warn=reporter.warn)
    task.shard(distribution, recipe=recipe)
    if distribution.divides:
        fill_parts(task.module, settings, distribution=distribution)
    return task


def open_clips_cache(
    settings: TrainSettings, *, distribution: Distribution, reporter: Reporter, source: ClipSource | None = None
) -> ClipCache | None:
    """Return the complete cache of encoded clips for a run, or None without a cache. All ranks must call this."""
    if settings.clip_cache is None:
        return None
    _, failed = fill_cache(
        settings,
        device=distribution.device,
        rank=distribution.rank,
        ranks=distribution.ranks,
        barrier=distribution.barrier,
        reporter=reporter,
        source=source,
    )
    if failed:
        others = f", and {len(failed) - 1} more clips" if len(failed) > 1 else ""
        reporter.warn(f"skipped: {failed[0].path} ({failed[0].reason}){others}")
    distribution.barrier()
    return ClipCache(Path(settings.clip_cache))


def count_parameters(settings: TrainSettings) -> int:
    """Return the number of trained parameters, without allocating them."""
    outline = find_objective(settings).outline(settings)
    return sum(weight.numel() for weight in outline.parameters() if weight.requires_grad)


def plan_attention(settings: TrainSettings, *, device: torch.device, tries_device: bool = True) -> AttentionPlan | None:
    """Return the attention backend for training, including gradients; None if no transformer is trained."""
    if not settings.trains_transformer:
        return None
    use = AttentionUse(
        device=device,
        dtype=torch_dtype(settings.precision.compute),
        head_dim=settings.model.hidden_size // settings.model.num_heads,
        gradients=True,
        in_parts=(settings.parallel.ring_degree or 1) > 1,
    )
    return choose_attention(
        settings.train_mmdit.attention, use, setting="train_mmdit.attention", tries_device=tries_device
    )


def build_transformer(settings: TrainSettings, *, distribution: Distribution) -> MMDiT:
    """Return the transformer with attention and first weights, or on the meta device if `distribution` divides it."""
    device = distribution.device
    transformer = empty_transformer(settings) if distribution.divides else new_transformer(settings, device=device)
    plan = plan_attention(settings, device=device)
    assert plan is not None
    transformer.set_attention(BACKENDS[plan.backend])
    return transformer


def empty_transformer(settings: TrainSettings) -> MMDiT:
    """Return the transformer on the meta device, in fp32, with its adapter if there is one."""
    return with_adapter(transformer_on_meta(settings.model), settings)


def with_adapter(transformer: MMDiT, settings: TrainSettings) -> MMDiT:
    if settings.lora.is_on:
        lora, has_critic = settings.lora, settings.objective.has_critic
        add_lora(transformer.to(weights_dtype(settings)), lora, seed=settings.loop.seed, has_critic=has_critic)
    return transformer


@torch.no_grad()
def new_transformer(settings: TrainSettings, *, device: torch.device) -> MMDiT:
    """Return the transformer with its first weights on `device`, and frozen weights of blocks in 8 bits if set.

    With `memory.offload`, frozen weights of blocks are on the host, for `streamed_weights`. On a CPU they stay mapped,
    in the dtype of their file.
    """
    transformer, memory = empty_transformer(settings), settings.memory
    stacks = tuple(f"{path}." for path in stack_paths(settings))
    for name, first in first_weights(settings):
        path, _, key = name.rpartition(".")
        layer = transformer.get_submodule(path)
        old = layer.get_parameter(key)
        is_frozen = name.startswith(stacks) and not old.requires_grad
        waits = is_frozen and memory.offload is WeightOffload.BLOCKS
        in_8_bits = is_frozen and memory.fp8_storage and key == "weight"
        dtype = first.dtype if waits and not memory.fp8_storage and device.type == "cpu" else old.dtype
        place = torch.device("cpu") if waits or in_8_bits else device
        # Weights on a CPU are mapped from the file, which others may write to. Only frozen weights may stay mapped.
        weight = first.to(place, dtype, copy=not settings.lora.is_on).contiguous()
        setattr(layer, key, nn.Parameter(weight, requires_grad=old.requires_grad))
        if in_8_bits and isinstance(layer, nn.Linear):
            parent, _, own = path.rpartition(".")
            setattr(transformer.get_submodule(parent), own, Fp8Linear(layer))
    assert not any(weight.is_meta for weight in transformer.parameters()), "every weight has a first value"
    return transformer if memory.offload is WeightOffload.BLOCKS else transformer.to(device)


@torch.no_grad()
def fill_parts(transformer: nn.Module, settings: TrainSettings, *, distribution: Distribution) -> None:
    """Fill a sharded `empty_transformer` with this rank's part of the first weights, one whole weight at a time."""
    parts = {distribution.whole_name(name): (name, weight) for name, weight in transformer.named_parameters()}
    for whole_name, whole in first_weights(settings):
        name, weight = parts.pop(whole_name)
        local(weight).copy_(distribution.part(name, whole))
    assert not parts, "every weight has a first value"


def first_weights(settings: TrainSettings) -> Iterator[tuple[str, Tensor]]:
    """Yield the first weights of a transformer, whole and with their names, one at a time on the host.

    They come from the file `init`, of any published layout, in its dtype, or are random from `loop.seed`, in fp32.
    Weights of an adapter come from `lora.init`, or are new. Raises CheckpointError if a file is missing or broken, or
    does not fit the sizes.
    """
    path, outline, seed = find_first_weights(settings), transformer_on_meta(settings.model), settings.loop.seed
    weights = _random_weights(outline, seed) if path is None else _read_weights(settings, outline, path)
    if not settings.lora.is_on:
        yield from weights
        return
    transformer = empty_transformer(settings)
    names = {name.replace(".base_layer.", "."): name for name, _ in transformer.named_parameters()}
    for name, weight in weights:
        yield names[name], weight
    adapter = dict(first_adapter(transformer, seed=seed))
    if settings.lora.init is not None:
        adapter.update(read_adapter(open_first_adapter(outline, settings.lora)))
    yield from adapter.items()


def _random_weights(outline: MMDiT, seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in outline.named_parameters():
        weight = torch.empty(parameter.shape, dtype=torch.float32)
        outline.initialize_weight(name, weight, generator=generator)
        yield name, weight


def _read_weights(settings: TrainSettings, outline: MMDiT, path: Path) -> Iterator[tuple[str, Tensor]]:
    return read_weights(
        outline,
        path,
        dtype=weights_dtype(settings),
        convert=converter(outline.config),
        allowed_missing=_MAY_BE_MISSING if settings.model.cond_embed else (),
    )
