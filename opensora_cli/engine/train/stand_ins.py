"""Stand-ins to measure or estimate a training step: random frozen parts, black clips, and ranks that send nothing."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.data.batches import SampledBatches, SampleRng
from opensora_cli.engine.components.architectures import new_autoencoder, vae_tiling
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.encode.clips import (
    LATENTS,
    POOLED_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    EmptyPrompt,
    Encoders,
    frozen_dtype,
    part_frames,
)
from opensora_cli.engine.encode.inputs import find_frozen_parts
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.distribution import Distribution, distribution_of
from opensora_cli.engine.train.memory import BatchShape, largest_batch_shape
from opensora_cli.memory.counting import DispatchMode, TensorBytes
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.parallel.mesh import use_mesh
from opensora_cli.settings.train import TrainSettings

GRADIENTS, BUFFERS = "gradients", "buffers"


# Files and clips


def random_frozen_parts(settings: TrainSettings) -> list[nn.Module]:
    """Return autoencoder, T5 and CLIP; empty with a cache of clips, with which training encodes nothing."""
    if settings.train_mmdit.cache is not None:
        return []
    frozen = [new_autoencoder(settings.vae), *random_text_encoders(settings)]
    for module in frozen:
        module.requires_grad_(False).eval().to(_frozen_dtype(settings))
    return frozen


def random_text_encoders(settings: TrainSettings) -> tuple[nn.Module, nn.Module]:
    """Return T5 and CLIP with the sizes in their folders.

    Without a folder, they have the released sizes if the transformer matches their widths. Otherwise they have the
    sizes of the demo with the transformer's widths.
    """
    files, parts, model = settings.train_mmdit.files, find_frozen_parts(settings), settings.model
    t5, clip = T5Sizes.of(parts[files.t5]), ClipSizes.of(parts[files.clip])
    if parts[files.t5] is None and t5.d_model != model.context_in_dim:
        t5 = replace(T5Sizes.of(packaged_demo() / "t5"), d_model=model.context_in_dim)
    if parts[files.clip] is None and clip.hidden_size != model.vec_in_dim:
        clip = replace(ClipSizes.of(packaged_demo() / "clip"), hidden_size=model.vec_in_dim)
    return T5Model(t5), ClipTextModel(clip)


def zero_empty_prompt(settings: TrainSettings) -> EmptyPrompt:
    """Return zeros as the embeddings of the empty prompt."""
    embeds = torch.zeros(settings.text.t5_max_length, settings.model.context_in_dim)
    return EmptyPrompt(embeds, torch.zeros(settings.model.vec_in_dim))


def stand_in_encoders(settings: TrainSettings, vae: Autoencoder) -> Encoders:
    """Return encoders of clips by an autoencoder, and of captions as zeros.

    The values of embeddings do not affect memory, and computing them needs little compared with a step.
    """
    return Encoders(
        vae,
        t5=lambda captions: torch.stack([zero_empty_prompt(settings).prompt_embeds_LC] * len(captions)),
        clip=lambda captions: torch.stack([zero_empty_prompt(settings).pooled_prompt_embeds_V] * len(captions)),
        dtype=_frozen_dtype(settings),
        tiling=vae_tiling(settings.vae),
    )


def largest_batches(settings: TrainSettings) -> SampledBatches:
    """Return the largest micro-batch, repeated."""

    def make(rng: SampleRng, number: int) -> Any:
        shape = largest_batch_shape(settings)
        if settings.clip_cache is not None:
            clips = tuple(_CachedBlackClip(settings, shape) for _ in range(shape.batch_size))
            return replace(shape.zeros(), pixels_BTHWC=None, cached=clips)
        return shape.zeros()

    return SampledBatches(make, seed=0)


@dataclass(frozen=True, slots=True)
class _CachedBlackClip:
    """Cached tensors of a black clip."""

    settings: TrainSettings
    shape: BatchShape

    def __getitem__(self, name: str) -> Tensor:
        if name in (PROMPT_EMBEDS, POOLED_PROMPT_EMBEDS):
            empty = zero_empty_prompt(self.settings)
            return empty.prompt_embeds_LC if name == PROMPT_EMBEDS else empty.pooled_prompt_embeds_V
        grid, dtype = self.settings.vae.grid, _frozen_dtype(self.settings)
        size = grid.latent_size(self.shape.height, self.shape.width)
        num_frames = self.shape.num_frames if name == LATENTS else part_frames(name)
        return torch.zeros(grid.latent_channels, grid.latent_frames(num_frames), *size, dtype=dtype)


def _frozen_dtype(settings: TrainSettings) -> torch.dtype:
    return frozen_dtype(settings.train_mmdit, torch.device(device_type(settings.device_name)))


# Ranks


@contextmanager
def fake_rank(settings: TrainSettings, rank: int) -> Iterator[Distribution]:
    """Simulate this rank of a run inside the block: collectives return at once, and do not fill their outputs.

    Enter this context before `fake_device`, inside which `Distribution.shard` is called. Raises RuntimeError
    in a process that already is a rank, and HardwareError if torch is too old.
    """
    device, ranks = torch.device("cpu"), settings.parallel.world_size
    if ranks == 1:
        yield Distribution(device)
        return
    if dist.is_initialized():
        raise RuntimeError("the memory of ranks is estimated in a process that is none of them")
    if settings.strategy.shards and torch.__version__ < "2.11":
        raise HardwareError(
            f"the memory of ranks that share weights is not estimated with torch {torch.__version__}, which has no "
            "collectives for fake tensors",
            hint="use torch 2.11 or later",
        )
    # Imported here because the import registers a backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield distribution_of(settings, device=device, kind=FakeDistribution)
    finally:
        use_mesh(None)
        dist.destroy_process_group()


class FakeDistribution(Distribution):
    """Distribution of one rank whose collectives do not fill their outputs.

    FSDP2's own code runs because it needs no results of its collectives. The reducer of DistributedDataParallel does
    not support fake tensors: separate tensors, allocated at the start, represent its buckets.
    """

    _is_last = True

    @cached_property
    def buckets(self) -> dict[nn.Parameter, Tensor]:
        """Mapping from a weight to its piece of a bucket."""
        return {}

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    def any(self, flag: bool) -> bool:
        return flag

    def replicate(self, module: nn.Module, trained: Collection[nn.Parameter]) -> nn.Module:
        for weight in trained:
            self.buckets[weight] = torch.empty_like(weight, requires_grad=False)
            weight.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]
        return module

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        self._is_last = last
        with super().accumulating(last=last):
            yield

    def _move(self, weight: nn.Parameter) -> None:
        """Copy a gradient of an update's last micro-batch into its bucket, unless it is already there."""
        if self._is_last and weight.grad is not None and weight.grad is not self.buckets[weight]:
            weight.grad = self.buckets[weight].copy_(weight.grad)


class ExchangeOwners(DispatchMode):
    """Dispatch mode that assigns FSDP2's communication buffers to owners of a counter. Enter it inside the counter."""

    def __init__(self, counter: TensorBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and assign owners to the communication buffers of FSDP2."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "fsdp":
            match func._opname:
                case "all_gather_copy_in":
                    self._counter.add(result[1], BUFFERS)
                case "split_with_sizes_copy":
                    self._counter.add(kwargs["out"], BUFFERS)
                case "chunk_cat":
                    self._counter.add(args[0], GRADIENTS)
                    self._counter.add(kwargs["out"], BUFFERS)
        return result
