"""Memory of the stages of a generation, and the least offload with which all fit in the memory of the device."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.device import GIB
from opensora_cli.core.documents import Document
from opensora_cli.settings.devices import HostWeights, MemorySettings, OffloadMode

TEXT, ENCODE, DENOISE, DECODE = "text", "encode", "denoise", "decode"
"""Stages that compute on the device."""

TEXT_ENCODERS, TRANSFORMER, AUTOENCODER = "text encoders", "transformer", "autoencoder"

MODEL_OF = {TEXT: TEXT_ENCODERS, ENCODE: AUTOENCODER, DENOISE: TRANSFORMER, DECODE: AUTOENCODER}
"""Model that each stage runs."""

_KEPT_FIRST = (TRANSFORMER, AUTOENCODER, TEXT_ENCODERS)
"""Models in the order in which they stay loaded: the transformer loads slowest, and the autoencoder is small."""

_NOTHING: Mapping[str, int] = MappingProxyType({})

CHUNK_TOKENS = 8192
"""Tokens that a block computes at a time, enough for full speed. The number does not depend on free memory, because
chunks of another size change the rounding of results."""
_FEW_TOKENS = 2048

_CHUNK_FRAMES = 4

_CAST_BLOCKS = 2
"""Resident blocks on a CPU that casts them: one computes while the next is cast."""

_WHOLE_MODELS = {
    OffloadMode.AUTO: (OffloadMode.NONE, OffloadMode.MODEL),
    OffloadMode.NONE: (OffloadMode.NONE,),
    OffloadMode.MODEL: (OffloadMode.MODEL,),
    OffloadMode.BLOCKS: (),
}

_HEADROOM = 0.05
"""Share of the memory that stays free for kernels, libraries and fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPlan:
    """Place and form of weights and activations while a video is generated.

    Moving weights keeps results bitwise identical, and chunks change only rounding; `fp8_storage` and `linear` are not
    exact.
    """

    mode: OffloadMode = OffloadMode.NONE
    """none: models stay on the device until their last stage; model: each model is there only in its stages; blocks:
    in addition, only some blocks of the transformer are there."""
    resident_blocks: int | None = None
    """Blocks whose weights are on the device at a time, including blocks in transit, with `blocks`."""
    host_weights: HostWeights = HostWeights.PINNED
    """Place of the other blocks, with `blocks`."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens that a transformer block computes at a time outside its attention."""
    chunk_frames: int | None = None
    """Frames that a layer of the decoder computes at a time; None means all."""
    store_on_host: bool = False
    """Keep the activations between two layers of the decoder on the host, with `chunk_frames`."""
    stream_text: bool = False
    """Stream T5 to the device layer by layer."""
    fp8_storage: bool = False
    """Store the weights of the blocks in 8 bits, and dequantize them at each use."""
    linear: LinearProducts = LinearProducts.EXACT
    """Products of the linear layers in the blocks; products in 8 bits store the weights in 8 bits, too."""
    modulation_on_host: bool = False
    """Keep the weights of modulation on the host, a quarter of the released transformer; modulation of all steps is
    computed before the first step. On a CPU these weights stay mapped, neither cast nor streamed with the blocks."""

    @property
    def in_8_bits(self) -> bool:
        """Whether weights of the blocks are stored in 8 bits."""
        return self.fp8_storage or self.linear is not LinearProducts.EXACT

    def lines(self) -> list[str]:
        """Return a line for each measure that saves memory."""
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
        return found


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Device memory of one stage."""

    name: str
    weight_bytes: int
    """Weights, including the models in `kept`; on a CPU without weights that are mapped from their file."""
    data_bytes: int
    """Inputs and outputs."""
    activation_bytes: int = 0
    """Largest size of all activations together, without the workspace of kernels."""
    mapped_bytes: int = 0
    """Weights that a CPU maps from their files. They are no part of the memory of the process."""
    kept: tuple[tuple[str, int], ...] = ()
    """Models that stay loaded although the stage does not run them, with their bytes."""

    @property
    def own_bytes(self) -> int:
        """Weights of the model that the stage runs."""
        return self.weight_bytes - sum(size for _, size in self.kept)

    @property
    def total_bytes(self) -> int:
        """Memory that must be free: everything except mapped weights."""
        return self.weight_bytes + self.data_bytes + self.activation_bytes


class HostMemory(Document):
    """Host memory of a machine, in addition to the memory of its devices."""

    pinned_bytes: int
    """Page-locked copies of weights, and offloaded activations and optimizer states."""
    page_cache_bytes: int
    """Files of weights. With less memory the run still works, and reads them from the disk again."""

    def line(self) -> str:
        """Return the parts as text."""
        return f"page-locked {gib(self.pinned_bytes)}, page cache {gib(self.page_cache_bytes)} for files of weights"


def verdict_line(*, needed: int, usable: int | None, on_gpu: bool, host: HostMemory, seconds: float | None) -> str:
    """Return the verdict of a plan for a device with `usable` bytes; None means that its memory is not known."""
    memory = "GPU memory" if on_gpu else "host memory"
    if usable is None:
        shown = f"Unknown: {gib(needed)} {memory}"
    else:
        shown = f"{'Fits' if needed <= usable else 'Does not fit'}: {needed / GIB:.1f} of {gib(usable)} {memory}"
    if on_gpu:
        shown += f", {gib(host.pinned_bytes + host.page_cache_bytes)} host memory"
    elif host.page_cache_bytes >= 0.05 * GIB:
        shown += f", {gib(host.page_cache_bytes)} page cache"
    return shown if seconds is None else f"{shown}, about {_about(seconds)} (predicted)"


def gib(num_bytes: int) -> str:
    """Return a size with one decimal."""
    return f"{num_bytes / GIB:.1f} GiB"


def _about(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloadable:
    """Parts of a run that can take less memory of the device.

    On a CPU, weights are streamed if their file has another dtype: they are cast when they are needed, not all at once.
    """

    num_blocks: int
    """Blocks of the transformer that can be streamed; 0 if they are computed where they are mapped."""
    host_weights: HostWeights = HostWeights.PINNED
    """Place of offloaded blocks, unless the settings name one."""
    text: bool = True
    """Whether the layers of T5 can be streamed."""
    text_first: bool = False
    """Whether the layers of T5 are always streamed: casting them for each text costs little."""
    frames: bool = True
    """Whether the autoencoder decodes in chunks of frames."""
    linear: LinearProducts = LinearProducts.EXACT
    """Products of the linear layers in the blocks."""
    chunk_tokens: int = CHUNK_TOKENS
    """Most tokens that a block computes at a time."""
    modulation_first: bool = False
    """Whether modulation is computed before the first step, so that its weights may stay on the host."""
    on_cpu: bool = False
    """Whether the device is the CPU. Resident blocks would take memory from the page cache, which has the file of the
    others, so that only as many are resident as casting needs."""


Estimate = Callable[[OffloadPlan], tuple[StageMemory, ...]]
"""Function from a plan to the memory of each stage."""


def choose_offload(memory: MemorySettings, run: Offloadable, estimate: Estimate, *, budget: int) -> OffloadPlan:
    """Return the plan with the least offload that fits in `budget` bytes; if nothing fits, with the least memory."""
    plan = OffloadPlan(
        host_weights=memory.host_weights or run.host_weights,
        fp8_storage=memory.fp8_storage,
        linear=run.linear,
        chunk_tokens=run.chunk_tokens,
        modulation_on_host=run.modulation_first and run.on_cpu,
    )
    most = int(budget * (1 - _HEADROOM))

    def first_fitting(candidates: Iterable[OffloadPlan], stage: str) -> OffloadPlan:
        def fits(candidate: OffloadPlan) -> bool:
            return all(each.total_bytes <= most for each in estimate(candidate) if each.name == stage)

        plans = tuple(candidates)
        if len(plans) == 1 or fits(plans[0]):
            return plans[0]
        # Each plan takes less memory than the one before, and there may be thousands. The last plan is the fallback.
        return plans[1 + bisect_left(plans[1:-1], True, key=fits)]

    # A run that decodes saved latents has no transformer.
    if any(stage.name == DENOISE for stage in estimate(plan)):
        plan = first_fitting(_denoise_plans(plan, memory, run), DENOISE)
    whole = () if run.text_first else (plan,)
    plan = first_fitting((*whole, replace(plan, stream_text=run.text)), TEXT)
    chunks = ((_CHUNK_FRAMES, False), (_CHUNK_FRAMES, True), (1, True)) if run.frames else ()
    chunked = (replace(plan, chunk_frames=frames, store_on_host=on_host) for frames, on_host in chunks)
    return first_fitting((plan, *chunked), DECODE)


def keep_models(
    stages: Sequence[StageMemory], *, budget: int, loaded: Mapping[str, int] = _NOTHING
) -> tuple[StageMemory, ...]:
    """Return the stages with the models that fit in `budget` bytes beside each.

    `loaded` has the bytes of models that are loaded already, whether or not a stage runs them.
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


def stronger_offload(plan: OffloadPlan, stage: str, run: Offloadable) -> OffloadPlan | None:
    """Return a plan in which `stage`, which ran out of memory, needs much less; None without such a plan."""
    match stage:
        case "text" if run.text and not plan.stream_text:
            return replace(plan, stream_text=True)
        case "denoise":
            stronger = replace(plan, chunk_tokens=_FEW_TOKENS)
            if run.num_blocks:
                stronger = replace(
                    stronger,
                    mode=OffloadMode.BLOCKS,
                    resident_blocks=max((plan.resident_blocks or run.num_blocks) // 2, 1),
                    modulation_on_host=plan.modulation_on_host or run.modulation_first,
                )
            return stronger if stronger != plan else None
        case "decode" if run.frames and (plan.chunk_frames != 1 or not plan.store_on_host):
            fewer = 1 if plan.store_on_host else _CHUNK_FRAMES
            return replace(plan, chunk_frames=fewer, store_on_host=True)
        case _:
            return None


def _denoise_plans(plan: OffloadPlan, memory: MemorySettings, run: Offloadable) -> Iterator[OffloadPlan]:
    """Yield plans, each with less memory than the plan before."""
    choice = OffloadMode.BLOCKS if memory.resident_blocks is not None else memory.offload
    whole = _WHOLE_MODELS[choice if run.num_blocks or choice is not OffloadMode.BLOCKS else OffloadMode.AUTO]
    yield from (replace(plan, mode=mode) for mode in whole)
    if run.modulation_first and choice is not OffloadMode.NONE:
        plan = replace(plan, modulation_on_host=True)
        if whole:
            yield replace(plan, mode=whole[-1])
    if choice not in (OffloadMode.AUTO, OffloadMode.BLOCKS):
        return
    if not run.num_blocks:
        yield replace(plan, mode=whole[-1], chunk_tokens=_FEW_TOKENS)
        return
    # Blocks that the settings name are offloaded also if all would fit.
    most = min(run.num_blocks - 1, _CAST_BLOCKS) if run.on_cpu else run.num_blocks - 1
    numbers = range(max(most, 1), 0, -1) if memory.resident_blocks is None else [memory.resident_blocks]
    for resident in numbers:
        yield (last := replace(plan, mode=OffloadMode.BLOCKS, resident_blocks=resident))
    yield replace(last, chunk_tokens=_FEW_TOKENS)
