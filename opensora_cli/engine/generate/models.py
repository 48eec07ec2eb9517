"""The models of a run: loaded when a stage first needs them, kept while they fit, streamed, and released.

Each model is created without weights and filled from its mapped file, tensor by tensor. A stage that runs out of memory
is retried in less of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.device import release_memory
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import BYTES
from opensora_cli.engine.components import architectures
from opensora_cli.engine.components.architectures import load_autoencoder, mmdit_config, transformer_on_meta
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.components.linear_products import use_in_block
from opensora_cli.engine.components.loras import add_loras
from opensora_cli.engine.components.parallelize import shard_t5
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.estimate.offload import (
    AUTOENCODER,
    DECODE,
    DENOISE,
    MODEL_OF,
    TEXT_ENCODERS,
    TRANSFORMER,
    OffloadPlan,
    keep_models,
)
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.ranks import ALONE, Ranks
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.host_memory import SharedCopies
from opensora_cli.memory.streaming import StreamingFigures, stream_blocks
from opensora_cli.models.attention import BACKENDS
from opensora_cli.models.mmdit.blocks import modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.layout import converter
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.parallel.tensor import shard_linears
from opensora_cli.settings.devices import HostWeights, OffloadMode

T = TypeVar("T")

TextEncoders = tuple[T5Encoder, ClipEncoder]
TextEmbeds = tuple[torch.Tensor, torch.Tensor]
"""Embeddings of one text: the outputs of T5 (1,L,C) and of CLIP (1,V)."""


@dataclass(frozen=True, slots=True)
class _Held:
    model: object
    key: object
    """Settings and files of the model; another value means another model."""
    device: torch.device
    num_bytes: int
    """Planned size in the memory of the device."""
    ends: ExitStack
    """Cleanup of resources other than the tensors of the model."""


class LoadedModels:
    """The text encoders, the transformer and the autoencoder, each loaded when a stage first needs it.

    Before a stage begins, `retried` releases the models that its plan does not keep beside it, and models that
    the plan needs in another form: other weights, dtype or offload. A model whose stage fails is released, too.

    Args:
        stay: whether models stay loaded after the run if there is room.
        ranks: processes of the run, each of which loads its part of T5 and of the transformer.
    """

    def __init__(self, *, stay: bool = False, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.prompts: dict[object, TextEmbeds] = {}
        """Embeddings of the texts that were encoded last, on the CPU."""
        self._stay = stay
        self._held: dict[str, _Held] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()
        self.prompts.clear()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def bytes_on(self, device: torch.device) -> int:
        """Return the planned size of all loaded models in a device's memory; all of it can be released."""
        return sum(held.num_bytes for held in self._held.values() if held.device == device)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan that keeps models beside the stages if they fit without other changes: bits stay the same."""
        if not self._stay or plan.settings.memory.offload is OffloadMode.MODEL:
            return plan
        loaded = {name: held.num_bytes for name, held in self._held.items() if held.device == plan.hardware.device}
        return replace(plan, stages=keep_models(plan.stages, budget=plan.budget_bytes, loaded=loaded))

    def keep_all(self, plan: Plan) -> bool:
        """Return whether the transformer and the autoencoder of a plan stay loaded from one sample to the next."""
        kept = {stage.name: dict(stage.kept) for stage in plan.stages}
        is_there = AUTOENCODER in kept.get(DENOISE, {}) and TRANSFORMER in kept.get(DECODE, {})
        return self._stay and self.ranks.count == 1 and is_there

    def make_room(self, plan: Plan, stage: str) -> None:
        """Release the models that the plan does not keep beside a stage, or needs in another form."""
        kept = {MODEL_OF[stage], *(name for each in plan.stages if each.name == stage for name, _ in each.kept)}
        planned = {MODEL_OF[each.name] for each in plan.stages}
        self._release(
            name
            for name, held in self._held.items()
            if name not in kept or (name in planned and held.key != _model_key(plan, name))
        )

    def release(self) -> None:
        """Release all models. Embeddings stay: later rows of a batch need no text encoders."""
        self._release(self._held)

    def release_others(self, stage: str, *, for_good: bool = False) -> None:
        """Release all models except the model of a stage. With `for_good`, models no longer stay after a run."""
        self._stay = self._stay and not for_good
        self._release(self._held.keys() - {MODEL_OF[stage]})

    def text_encoders(self, plan: Plan, events: Events) -> AbstractContextManager[TextEncoders]:
        device, dtype = plan.hardware.device, plan.hardware.dtype

        def load(ends: ExitStack) -> TextEncoders:
            with events.stage("load", total=2, unit="encoders") as progress:
                t5 = load_t5(plan, group=self.ranks.text_group)
                progress.advance()
                folder, length = plan.weights.path(Component.CLIP), plan.settings.text.clip_max_length
                clip = architectures.load_clip(folder, max_length=length, device=device, dtype=dtype)
                progress.advance()
                if plan.offload.stream_text:
                    ends.enter_context(architectures.streamed_layers(t5, device=device, dtype=dtype))
            return t5, clip

        return self._provide(TEXT_ENCODERS, plan, load)

    @contextmanager
    def transformer(self, plan: Plan, events: Events) -> Iterator[MMDiT]:
        def load(ends: ExitStack) -> MMDiT:
            group, machine_group = self.ranks.of(plan).tensor_group, self.ranks.machine_group
            with _loading(plan, Component.TRANSFORMER, events) as advance:
                transformer = load_transformer(plan, group=group, machine_group=machine_group, advance=advance)
            if plan.settings.compile:
                compile_blocks(transformer, warn=events.reporter.warn)
            if plan.offload.mode is OffloadMode.BLOCKS:
                with events.stage("offload"):
                    try:
                        ends.enter_context(streamed_blocks(plan, transformer))
                    except HardwareError as error:
                        if plan.settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
                            raise
                        events.reporter.warn(f"{error.message}: the blocks stay mapped from their file")
                        ends.enter_context(streamed_blocks(plan, transformer, source=HostWeights.MAPPED))
            return transformer

        with self._provide(TRANSFORMER, plan, load) as transformer:
            prepare(transformer, plan)
            yield transformer

    def autoencoder(self, plan: Plan, events: Events) -> AbstractContextManager[Autoencoder]:
        def load(_: ExitStack) -> Autoencoder:
            path, device, dtype = plan.weights.path(Component.VAE), plan.hardware.device, plan.hardware.dtype
            with _loading(plan, Component.VAE, events) as advance:
                return load_autoencoder(plan.settings.vae, path, device=device, dtype=dtype, advance=advance)

        return self._provide(AUTOENCODER, plan, load)

    @contextmanager
    def _provide(self, name: str, plan: Plan, load: Callable[[ExitStack], T]) -> Iterator[T]:
        """Provide a model, loaded if it is missing or has another form, and released if the block fails."""
        key = _model_key(plan, name)
        try:
            if name in self._held and self._held[name].key != key:
                self._release([name])
            if name not in self._held:
                own = next((stage.own_bytes for stage in plan.stages if MODEL_OF[stage.name] == name), 0)
                with ExitStack() as ends:
                    loaded = load(ends)
                    self._held[name] = _Held(loaded, key, plan.hardware.device, own, ends.pop_all())
                del loaded
            yield cast(T, self._held[name].model)
        except BaseException:
            if name in self._held:
                self._release([name])
            raise

    def _release(self, names: Iterable[str]) -> None:
        released = [self._held.pop(name) for name in tuple(names)]
        devices = {held.device for held in released}
        while released:
            released.pop().ends.close()
        for device in devices:
            release_memory(device)


@contextmanager
def _loading(plan: Plan, component: Component, events: Events) -> Iterator[Callable[[int], None]]:
    total = sum(entry.nbytes for entry in open_checkpoint(plan.weights.path(component)).entries.values())
    with events.stage("load", total=total, unit=BYTES) as progress:
        yield progress.advance


def _model_key(plan: Plan, name: str) -> object:
    """Return the files and the settings on which a model depends."""
    settings, offload = plan.settings, plan.offload
    streams = offload.mode is OffloadMode.BLOCKS and (offload.resident_blocks, offload.host_weights)
    loras = tuple((lora.path, lora.scale, lora.sha256) for lora in plan.loras)
    form = offload.fp8_storage, offload.linear, offload.modulation_on_host, streams
    parts: dict[str, tuple[tuple[Component, ...], object]] = {
        TEXT_ENCODERS: ((Component.T5, Component.CLIP), (settings.text, offload.stream_text)),
        TRANSFORMER: ((Component.TRANSFORMER,), (settings.model, settings.compile, loras, plan.mesh.tensor, form)),
        AUTOENCODER: ((Component.VAE,), settings.vae),
    }
    components, made_of = parts[name]
    files = [(path, stamp_of(path)) for path in map(plan.weights.path, components)]
    return files, plan.hardware.device, plan.hardware.dtype, made_of


def retried(run: Callable[[Plan], T], plan: Plan, stage: str, models: LoadedModels, events: Events) -> tuple[T, Plan]:
    """Call `run` with a plan, and after running out of memory again: without other models, then with more offload.

    `run` does the work of `stage`, and leaves nothing on the device when it fails. Returns its result and the plan of
    the last attempt. Raises OutOfMemoryError if the last attempt runs out of memory, or nothing is left to give up.
    """
    models.make_room(plan, stage)
    try:
        return run(plan), plan
    except OutOfMemoryError as error:
        are_others = plan.mesh.size == 1 and bool(models.names)
        alone = tuple(replace(each, weight_bytes=each.own_bytes, kept=()) for each in plan.stages)
        stronger = replace(plan, stages=alone) if are_others else plan.with_stronger_offload(stage)
        if stronger is None:
            raise
        message = error.message
    # The traceback of the first attempt holds its tensors: release memory here, after the except block.
    models.release_others(stage, for_good=are_others)
    release_memory(plan.hardware.device)
    if are_others:
        events.reporter.warn(f"{message}; retrying with one model loaded at a time")
        return retried(run, stronger, stage, models, events)
    events.reporter.warn(f"{message}; retrying with: {'; '.join(stronger.offload.lines())}")
    return run(stronger), stronger


def load_t5(plan: Plan, *, group: dist.ProcessGroup | None = None) -> T5Encoder:
    """Return the T5 encoder, whose layers the ranks of `group` share, unless they stay on the CPU to be streamed."""
    streams, device, dtype = plan.offload.stream_text, plan.hardware.device, plan.hardware.dtype
    t5 = architectures.load_t5(
        plan.weights.path(Component.T5),
        max_length=plan.settings.text.t5_max_length,
        device=device,
        dtype=dtype,
        layers_on_host=streams or group is not None,
    )
    if group is not None and not streams:
        if dist.get_world_size(group) <= t5.model.sizes.num_heads:
            shard_t5(t5, group)
        t5.blocks.to(device=device, dtype=dtype if architectures.cast_later(device, dtype) else None)
    return t5


def load_transformer(
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    machine_group: dist.ProcessGroup | None = None,
    advance: Callable[[int], None] | None = None,
) -> MMDiT:
    """Return the transformer with its adapters. Files in another published layout are converted.

    Offloaded blocks stay on the CPU, for `streamed_blocks`.

    Args:
        group: `Ranks.tensor_group`.
        machine_group: `Ranks.machine_group`.
        advance: called with the bytes of each tensor.
    """
    path, offload, device = plan.weights.path(Component.TRANSFORMER), plan.offload, plan.hardware.device
    transformer = transformer_on_meta(plan.settings.model).requires_grad_(False).eval()
    streams = offload.mode is OffloadMode.BLOCKS
    changes = offload.in_8_bits or group is not None
    stacks = repeated_blocks(transformer.config)
    blocks = {f"{stack.module_path}.{index}": stack for stack in stacks for index in range(stack.count)}
    patterns = [f"{stack.module_path}.*" for stack in stacks]
    modulation = [f"{layer}.*" for layer in modulation_layers(transformer.config)] if offload.modulation_on_host else []

    with ExitStack() as ends:
        hold: Callable[[torch.Tensor], torch.Tensor] | None = None
        if machine_group is not None:
            hold = ends.enter_context(SharedCopies(machine_group)).hold

        def finish_block(path: str) -> None:
            block = transformer.get_submodule(path)
            if group is not None:
                stack = blocks[path]
                shard_linears(block, stack.linears, group, used_by_all_heads=stack.used_by_all_heads)
            if offload.linear is not LinearProducts.EXACT:
                use_in_block(block, blocks[path], offload.linear)
            if offload.fp8_storage:
                store_in_fp8(block)
            if not streams and device.type != "cpu":
                move_except(host_modulation(transformer, offload), block, device)
            # Ranks of a tensor-parallel group have different weights, and share no copies.
            if hold is not None and group is None:
                for weight in block.parameters():
                    if weight.device.type == "cpu" and weight.dtype in (torch.float8_e4m3fn, torch.int8):
                        weight.data = hold(weight.data)

        load_into_module(
            transformer,
            path,
            device=device,
            dtype=plan.hardware.dtype,
            convert=converter(mmdit_config(plan.settings.model)),
            keep_on_host=patterns + modulation if streams or changes else modulation,
            keep_dtype=patterns + modulation if _casts_blocks_at_use(plan) else (),
            # One block at a time: the host never holds more than one that has not been changed yet.
            blocks=list(blocks) if changes else (),
            finish_block=finish_block if changes else None,
            hold=hold,
            advance=advance,
        )
    if plan.loras:
        add_loras(transformer, plan.loras, dtype=plan.hardware.dtype, group=group)
    prepare(transformer, plan)
    return transformer


def prepare(transformer: MMDiT, plan: Plan) -> None:
    """Apply the parts of a plan that need no other weights: sequence chunks and attention backend."""
    transformer.set_sequence_chunk(plan.offload.chunk_tokens)
    if plan.attention is not None:
        transformer.set_attention(BACKENDS[plan.attention.backend])


def streamed_blocks(
    plan: Plan, transformer: MMDiT, *, source: HostWeights | None = None
) -> AbstractContextManager[StreamingFigures]:
    """Return a context that copies offloaded blocks to the device when needed; `source` None is the planned place."""
    stacks = repeated_blocks(transformer.config)
    return stream_blocks(
        [cast(nn.ModuleList, transformer.get_submodule(stack.module_path)) for stack in stacks],
        device=plan.hardware.device,
        resident=plan.offload.resident_blocks or 1,
        source=(source or plan.offload.host_weights).value,
        dtype=plan.hardware.dtype if _casts_blocks_at_use(plan) else None,
        without=host_modulation(transformer, plan.offload),
    )


def host_modulation(transformer: MMDiT, offload: OffloadPlan) -> list[nn.Module]:
    """Return the modulation layers whose weights stay on the host, since they run once, before the first step."""
    if not offload.modulation_on_host:
        return []
    return [transformer.get_submodule(path) for path in modulation_layers(transformer.config)]


def move_except(excluded: Sequence[nn.Module], block: nn.Module, device: torch.device) -> None:
    """Move a block to a device, except some of its layers, whose parents have no weights of their own."""
    if not any(part in excluded for part in block.modules()):
        block.to(device)
        return
    for child in block.children():
        if child not in excluded:
            move_except(excluded, child, device)


def _casts_blocks_at_use(plan: Plan) -> bool:
    """Return whether blocks are cast when they are needed, which happens on a CPU only."""
    offload = plan.offload
    return plan.hardware.device.type == "cpu" and offload.mode is OffloadMode.BLOCKS and not offload.in_8_bits
