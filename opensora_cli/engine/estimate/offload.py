"""How weights and activations are kept within a memory: what can be given up, and what is given up first."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.settings.devices import MemorySettings
from opensora_cli.settings.enums import HostWeights, OffloadMode

ON_DEVICE = TEXT, ENCODE, DENOISE, DECODE = "text", "encode", "denoise", "decode"
"""The stages that compute on the device."""

TEXT_ENCODERS, TRANSFORMER, AUTOENCODER = "text encoders", "transformer", "autoencoder"

MODEL_OF = {TEXT: TEXT_ENCODERS, ENCODE: AUTOENCODER, DENOISE: TRANSFORMER, DECODE: AUTOENCODER}
"""What each stage runs."""

_KEPT_FIRST = (TRANSFORMER, AUTOENCODER, TEXT_ENCODERS)
"""The transformer takes longest to load; the autoencoder is small."""

_NOTHING: Mapping[str, int] = MappingProxyType({})

CHUNK_TOKENS = 8192
"""Enough for matrix products to run at full speed. Always, and not only where memory is short: results differ by
rounding between chunks of different sizes, and should not depend on what else is on the device."""
_FEW_TOKENS = 2048

_CHUNK_FRAMES = 4

_CAST_BLOCKS = 2
"""One computes while the next is cast."""

_WHOLE_MODELS = {
    OffloadMode.AUTO: (OffloadMode.NONE, OffloadMode.MODEL),
    OffloadMode.NONE: (OffloadMode.NONE,),
    OffloadMode.MODEL: (OffloadMode.MODEL,),
    OffloadMode.BLOCKS: (),
}

_HEADROOM = 0.05
"""Part of the memory that is left free, for what kernels and libraries take for themselves, and allocators waste."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """What is kept where while a video is generated.

    Moving weights changes no bit of the result, the size of chunks no more than rounding; `fp8_storage` and
    `linear` are not exact.
    """

    mode: OffloadMode = OffloadMode.NONE
    """none: models stay on the device until they are of no more use; model: each is there in its stages alone; blocks:
    and of the transformer only some blocks."""
    resident_blocks: int | None = None
    """With `blocks`: how many blocks' weights are on the device at a time, those in transit included."""
    host_weights: HostWeights = HostWeights.PINNED
    """With `blocks`: where the others are kept."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens that a transformer block computes at a time outside its attention."""
    chunk_frames: int | None = None
    """Frames that a layer of the decoder computes at a time; None: all."""
    store_on_host: bool = False
    """With `chunk_frames`: keep what waits between two layers of the decoder in the host's memory."""
    stream_text: bool = False
    """Bring T5 to the device layer by layer."""
    fp8_storage: bool = False
    """Keep the blocks' weights in 8 bits, and dequantize them on each use: not exact."""
    linear: LinearProducts = LinearProducts.EXACT
    """How the linear layers of the blocks are multiplied: in 8 bits, these weights are stored so, too."""
    modulation_on_host: bool = False
    """Keep the weights of modulation on the host, a quarter of the released transformer's: what it is at all steps is
    computed before the first one. On a CPU: where they are mapped, neither cast nor streamed with the blocks."""
    batch_size: int = 1
    """Clips that the transformer computes together."""
    decode_batch_size: int = 1
    """Clips that are decoded together."""

    @property
    def in_8_bits(self) -> bool:
        """Whether weights of the blocks are stored in 8 bits."""
        return self.fp8_storage or self.linear is not LinearProducts.EXACT

    def lines(self) -> list[str]:
        """Return what is given up, and what is computed together, for people; nothing is nothing."""
        found = []
        if self.mode is OffloadMode.BLOCKS:
            found.append(
                f"blocks of the transformer on the device: {self.resident_blocks}, the others {self.host_weights}"
            )
        elif self.mode is OffloadMode.MODEL:
            found.append("one model on the device at a time")
        if self.stream_text:
            found.append("T5 layer by layer")
        if self.chunk_tokens < CHUNK_TOKENS:
            found.append(f"tokens at a time: {self.chunk_tokens}")
        if self.chunk_frames is not None:
            where = ", the rest on the host" if self.store_on_host else ""
            found.append(f"decoded frames at a time: {self.chunk_frames}{where}")
        if self.fp8_storage:
            found.append("weights stored in 8 bits (storage, not compute; not exact)")
        if self.linear is not LinearProducts.EXACT:
            found.append(f"linear layers of the blocks stored and multiplied in {self.linear} (not exact)")
        if self.batch_size > 1:
            found.append(f"clips computed together: {self.batch_size}, decoded together: {self.decode_batch_size}")
        return found


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of a device that one stage needs."""

    name: str
    weight_bytes: int
    """Those of `kept` included; on a CPU those that are not computed with where they are mapped from their file."""
    data_bytes: int
    """What goes in and out."""
    activation_bytes: int = 0
    """The most tensors that are computed on the way; what kernels take for themselves comes on top."""
    mapped_bytes: int = 0
    """On a CPU, of the weights' files: what is read from them each time that the model runs, unless the page cache has
    it. It is no part of the memory that the stage takes for itself."""
    kept: tuple[tuple[str, int], ...] = ()
    """Models that the stage does not run and that stay loaded meanwhile, and their bytes."""

    @property
    def own_bytes(self) -> int:
        """The weights of the model that the stage runs."""
        return self.weight_bytes - sum(size for _, size in self.kept)

    @property
    def total_bytes(self) -> int:
        """What must be free: all but what is mapped."""
        return self.weight_bytes + self.data_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Streamable:
    """What takes less of the device if it comes to it piece by piece.

    On a CPU these are the weights that their file has in another dtype: cast as they are needed, and not all at once.
    """

    blocks: bool = True
    """Of the transformer."""
    text: bool = True
    """T5's layers."""
    frames: bool = True
    """Of a clip that is decoded, as far as the autoencoder `decodes_in_chunks`."""
    from_page_cache: bool = False
    """They come from a file that the page cache holds, in as much memory as resident blocks leave it: then only those
    are resident that are needed for casting one while another computes."""
    text_first: bool = False
    """T5's layers are streamed wherever that is possible: casting them for each text costs little."""


_ALL = Streamable()

Estimate = Callable[[OffloadPlan], tuple[StageMemory, ...]]
"""What each stage needs under a plan."""


def choose_offload(
    memory: MemorySettings,
    estimate: Estimate,
    *,
    budget: int,
    num_blocks: int,
    host_weights: HostWeights,
    streamable: Streamable = _ALL,
    batch_size: int = 1,
    linear: LinearProducts = LinearProducts.EXACT,
    chunk_tokens: int = CHUNK_TOKENS,
    modulation_first: bool = False,
    host_is_device: bool = False,
) -> OffloadPlan:
    """Return the plan that gives up least of what fits, stage by stage; where nothing fits, the one that needs least.

    `budget` is in bytes of the device. Offloaded blocks are kept in `host_weights`, unless `memory` names it. The
    transformer computes `batch_size` clips together, and of each `chunk_tokens` at a time, or fewer; its blocks
    multiply as `linear` says. With `modulation_first` its weights may stay on the host, and do so where that is the
    device.
    """
    plan = OffloadPlan(
        host_weights=memory.host_weights or host_weights,
        fp8_storage=memory.fp8_storage,
        linear=linear,
        batch_size=batch_size,
        chunk_tokens=chunk_tokens,
        modulation_on_host=modulation_first and host_is_device,
    )
    most = int(budget * (1 - _HEADROOM))

    def first_fitting(candidates: Iterable[OffloadPlan], stage: str) -> OffloadPlan:
        def fits(candidate: OffloadPlan) -> bool:
            return all(each.total_bytes <= most for each in estimate(candidate) if each.name == stage)

        plans = tuple(candidates)
        if len(plans) == 1 or fits(plans[0]):
            return plans[0]
        # Each takes less than the one before, and there may be thousands. The last is taken in any case.
        return plans[1 + bisect_left(plans[1:-1], True, key=fits)]

    # Where latents are only decoded, nothing is said of a transformer.
    if any(stage.name == DENOISE for stage in estimate(plan)):
        candidates = _denoise_plans(plan, memory, num_blocks, streamable, modulation_first=modulation_first)
        plan = first_fitting(candidates, DENOISE)
    whole = () if streamable.text_first else (plan,)
    plan = first_fitting((*whole, replace(plan, stream_text=streamable.text)), TEXT)
    return first_fitting(_decode_plans(plan) if streamable.frames else [plan], DECODE)


def largest_batch(
    sized: Callable[[int], OffloadPlan], stage: str, estimate: Estimate, *, budget: int, most: int
) -> OffloadPlan:
    """Return the plan of the largest batch, up to `most`, with which a stage fits; of 1 where none does.

    `sized` returns the plan of a batch; `budget` is as in `choose_offload`.
    """
    room = int(budget * (1 - _HEADROOM))

    def is_too_large(batch: int) -> bool:
        return any(each.total_bytes > room for each in estimate(sized(batch)) if each.name == stage)

    # Mostly all fit; otherwise an estimate takes a while, and there may be hundreds of sizes.
    if most > 1 and not is_too_large(most):
        return sized(most)
    return sized(1 + bisect_left(range(2, most), True, key=is_too_large))


def keep_models(
    stages: Sequence[StageMemory], *, budget: int, loaded: Mapping[str, int] = _NOTHING
) -> tuple[StageMemory, ...]:
    """Return the stages with every model kept beside each that has room there; `budget` as in `choose_offload`.

    `loaded` are the bytes of models that are there already, of which the stages may run none.
    """
    sizes = {**loaded, **{MODEL_OF[stage.name]: stage.own_bytes for stage in stages}}
    most = int(budget * (1 - _HEADROOM))

    def filled(stage: StageMemory) -> StageMemory:
        for model in _KEPT_FIRST:
            is_there = model == MODEL_OF[stage.name] or model in dict(stage.kept)
            if model in sizes and not is_there and stage.total_bytes + sizes[model] <= most:
                kept = (*stage.kept, (model, sizes[model]))
                stage = replace(stage, weight_bytes=stage.weight_bytes + sizes[model], kept=kept)
        return stage

    return tuple(map(filled, stages))


def stronger_offload(
    plan: OffloadPlan,
    stage: str,
    *,
    num_blocks: int,
    streamable: Streamable = _ALL,
    modulation_first: bool = False,
) -> OffloadPlan | None:
    """Return a plan under which `stage`, which ran out of memory under `plan`, needs much less; None: there is none."""
    match stage:
        case "denoise" if plan.batch_size > 1:
            return replace(plan, batch_size=plan.batch_size // 2)
        case "decode" if plan.decode_batch_size > 1:
            return replace(plan, decode_batch_size=plan.decode_batch_size // 2)
        case "text" if streamable.text and not plan.stream_text:
            return replace(plan, stream_text=True)
        case "denoise" if not streamable.blocks:
            fewer_tokens = replace(plan, chunk_tokens=_FEW_TOKENS)
            return fewer_tokens if fewer_tokens != plan else None
        case "denoise" if num_blocks:
            fewer = max((plan.resident_blocks or num_blocks) // 2, 1)
            stronger = replace(
                plan,
                mode=OffloadMode.BLOCKS,
                resident_blocks=fewer,
                chunk_tokens=_FEW_TOKENS,
                modulation_on_host=plan.modulation_on_host or modulation_first,
            )
            return stronger if stronger != plan else None
        case "decode" if streamable.frames and (plan.chunk_frames != 1 or not plan.store_on_host):
            fewer = 1 if plan.store_on_host else _CHUNK_FRAMES
            return replace(plan, chunk_frames=fewer, store_on_host=True)
        case _:
            return None


def _denoise_plans(
    plan: OffloadPlan, memory: MemorySettings, num_blocks: int, streamable: Streamable, *, modulation_first: bool
) -> Iterator[OffloadPlan]:
    """Yield plans, of which each takes less than those before it."""
    num_blocks = num_blocks if streamable.blocks else 0
    choice = OffloadMode.BLOCKS if memory.resident_blocks is not None else memory.offload
    whole = _WHOLE_MODELS[choice if num_blocks or choice is not OffloadMode.BLOCKS else OffloadMode.AUTO]
    yield from (replace(plan, mode=mode) for mode in whole)
    if modulation_first and choice is not OffloadMode.NONE:
        plan = replace(plan, modulation_on_host=True)
        if whole:
            yield replace(plan, mode=whole[-1])
    if choice not in (OffloadMode.AUTO, OffloadMode.BLOCKS):
        return
    if not num_blocks:
        yield replace(plan, mode=whole[-1], chunk_tokens=_FEW_TOKENS)
        return
    # Asked for by name, blocks are offloaded also where all would fit.
    most = min(num_blocks - 1, _CAST_BLOCKS) if streamable.from_page_cache else num_blocks - 1
    numbers = range(max(most, 1), 0, -1) if memory.resident_blocks is None else [memory.resident_blocks]
    for resident in numbers:
        yield (last := replace(plan, mode=OffloadMode.BLOCKS, resident_blocks=resident))
    yield replace(last, chunk_tokens=_FEW_TOKENS)


def _decode_plans(plan: OffloadPlan) -> Iterator[OffloadPlan]:
    yield plan
    yield replace(plan, chunk_frames=_CHUNK_FRAMES)
    yield replace(plan, chunk_frames=_CHUNK_FRAMES, store_on_host=True)
    yield replace(plan, chunk_frames=1, store_on_host=True)
