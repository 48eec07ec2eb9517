"""The models of a run: loaded from their files, lent to stages, kept while they fit, and released.

Each model is created without weights and filled from its mapped file, tensor by tensor.
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
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.core.progress import BYTES, Reporter
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.engine.components import text_encoders
from opensora_cli.engine.components.autoencoders import load_autoencoder
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.configs import mmdit_config, transformer_on_meta
from opensora_cli.engine.components.hardware import OutOfMemoryError, release_memory
from opensora_cli.engine.components.linear_products import LinearProductsReport, use_in_block
from opensora_cli.engine.components.loras import add_loras
from opensora_cli.engine.components.parallelize import shard_block, shard_t5
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.encode.prompt_cache import PromptCache
from opensora_cli.engine.estimate.offload import (
    AUTOENCODER,
    MODEL_OF,
    TEXT_ENCODERS,
    TRANSFORMER,
    OffloadPlan,
    StageMemory,
    keep_models,
)
from opensora_cli.engine.generate.events import RunRecord
from opensora_cli.engine.generate.plan import Plan, gib_or_less
from opensora_cli.memory.eight_bit_products import ProductError
from opensora_cli.memory.fp8_storage import store_in_fp8
from opensora_cli.memory.host_memory import SharedCopies
from opensora_cli.memory.streaming import StreamingFigures, stream_blocks
from opensora_cli.models.attention import attention_backend
from opensora_cli.models.mmdit.blocks import modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.layout import Rotary, converter, find_rotary
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.encoders import ClipEncoder, PromptReader, T5Encoder
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.enums import HostWeights, OffloadMode

Advance = Callable[[int], None]
"""Called with the bytes of each tensor as it is loaded."""


def load_t5(plan: Plan, *, group: dist.ProcessGroup | None = None) -> T5Encoder:
    """Return the T5 encoder; with `stream_text` its layers stay on the CPU, for `streamed_layers`.

    Otherwise the ranks of `group` share its layers, if they have a head for each. A folder that is missing, incomplete
    or broken is a CheckpointError.
    """
    streams, device, dtype = plan.offload.stream_text, plan.hardware.device, plan.hardware.dtype
    t5 = text_encoders.load_t5(
        plan.weights.path(Component.T5),
        max_length=plan.settings.text.t5_max_length,
        device=device,
        dtype=dtype,
        layers_on_host=streams or group is not None,
    )
    if group is not None and not streams:
        if dist.get_world_size(group) <= t5.model.sizes.num_heads:
            shard_t5(t5, group)
        t5.blocks.to(device=device, dtype=dtype if text_encoders.cast_later(device, dtype) else None)
    return t5


def load_clip(plan: Plan) -> ClipEncoder:
    """Return the CLIP encoder.

    A CheckpointError if its folder is missing, incomplete or broken, a RequestError if `text.clip_max_length` is over
    what the model can read.
    """
    return text_encoders.load_clip(
        plan.weights.path(Component.CLIP),
        max_length=plan.settings.text.clip_max_length,
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
    )


def prompt_readers(plan: Plan) -> tuple[PromptReader, PromptReader]:
    """Return how T5 and CLIP read prompts, without their weights; errors as `load_t5` and `load_clip`."""
    text = plan.settings.text
    return (
        T5Encoder.reader(plan.weights.path(Component.T5), max_length=text.t5_max_length),
        ClipEncoder.reader(plan.weights.path(Component.CLIP), max_length=text.clip_max_length),
    )


def load_transformer(
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    machine_group: dist.ProcessGroup | None = None,
    advance: Advance | None = None,
    measured: Callable[[ProductError], object] | None = None,
) -> MMDiT:
    """Return the transformer with its adapters; a file in another published layout is converted.

    Where blocks are offloaded they stay on the CPU, for `streamed_blocks`.

    Args:
        group: ranks that share each block's heads and features.
        machine_group: the ranks of this machine, which hold one copy of what is offloaded to the CPU.
        advance: called with the bytes of each tensor.
        measured: called with the error of each layer that multiplies in 8 bits.

    Raises:
        CheckpointError: the file is missing or broken, or its keys or shapes do not fit the settings; or an adapter
            cannot be read.
    """
    settings, path, offload = plan.settings.model, plan.weights.path(Component.TRANSFORMER), plan.offload
    transformer = transformer_on_meta(settings)
    checkpoint = open_checkpoint(path)
    rotary = find_rotary(checkpoint.entries, checkpoint.metadata)
    streams = offload.mode is OffloadMode.BLOCKS
    changes = offload.in_8_bits or group is not None
    stacks = repeated_blocks(transformer.config)
    blocks = {f"{stack.module_path}.{index}": stack for stack in stacks for index in range(stack.count)}
    patterns = [f"{stack.module_path}.*" for stack in stacks]
    modulation = [f"{layer}.*" for layer in modulation_layers(transformer.config)] if offload.modulation_on_host else []
    transformer.requires_grad_(False).eval()

    def change(path: str) -> None:
        block = transformer.get_submodule(path)
        if group is not None:
            shard_block(block, blocks[path], group)
        if offload.linear is not LinearProducts.EXACT:
            for error in use_in_block(block, blocks[path], offload.linear):
                if measured is not None:
                    measured(replace(error, path=f"{path}.{error.path}"))
        if offload.fp8_storage:
            store_in_fp8(block)
        if not streams and plan.hardware.device.type != "cpu":
            move_but(waiting_modulation(transformer, offload), block, plan.hardware.device)
        # Shares of heads and features differ from rank to rank.
        if copies is not None and group is None:
            _hold_8_bits(block, copies)

    with _shared_copies(machine_group) as copies:
        load_into_module(
            transformer,
            path,
            device=plan.hardware.device,
            dtype=plan.hardware.dtype,
            convert=converter(mmdit_config(settings), interleaved=rotary is Rotary.INTERLEAVED),
            keep_on_host=patterns + modulation if streams or changes else modulation,
            keep_dtype=patterns + modulation if _casts_later(plan) else (),
            # One after the other: the host never holds more than one that has not been changed yet.
            blocks=list(blocks) if changes else (),
            finish_block=change if changes else None,
            hold=None if copies is None else copies.hold,
            advance=advance,
        )
    add_loras(transformer, plan.loras, dtype=plan.hardware.dtype, group=group)
    prepare(transformer, plan)
    return transformer


def waiting_modulation(transformer: MMDiT, offload: OffloadPlan) -> list[nn.Module]:
    """Return the layers whose weights stay on the host, since they run before the first step alone."""
    if not offload.modulation_on_host:
        return []
    return [transformer.get_submodule(path) for path in modulation_layers(transformer.config)]


def move_but(without: Sequence[nn.Module], block: nn.Module, device: torch.device) -> None:
    """Move a block to a device, in place, but for some of its layers; modules that have these have no weights of their
    own.
    """
    if not any(part in without for part in block.modules()):
        block.to(device)
        return
    for child in block.children():
        if child not in without:
            move_but(without, child, device)


def prepare(transformer: MMDiT, plan: Plan) -> None:
    """Give the transformer what a plan changes without other weights."""
    transformer.set_sequence_chunk(plan.offload.chunk_tokens)
    if plan.attention is not None:
        transformer.set_attention(attention_backend(plan.attention.backend))


def _casts_later(plan: Plan) -> bool:
    """Return whether blocks are cast when they are needed, which happens on a CPU only."""
    offload = plan.offload
    return plan.hardware.device.type == "cpu" and offload.mode is OffloadMode.BLOCKS and not offload.in_8_bits


@contextmanager
def _shared_copies(machine_group: dist.ProcessGroup | None) -> Iterator[SharedCopies | None]:
    if machine_group is None:
        yield None
    else:
        with SharedCopies(machine_group) as copies:
            yield copies


def _hold_8_bits(block: nn.Module, copies: SharedCopies) -> None:
    for weight in block.parameters():
        if weight.device.type == "cpu" and weight.dtype in (torch.float8_e4m3fn, torch.int8):
            weight.data = copies.hold(weight.data)


def streamed_blocks(
    plan: Plan, transformer: MMDiT, *, source: HostWeights | None = None
) -> AbstractContextManager[StreamingFigures]:
    """Return the context in which the offloaded blocks of `load_transformer` come to the device and go again.

    The rest of the transformer is on the device. `source` is where the blocks are kept; None: as planned.
    """
    return stream_blocks(
        _stacks(transformer),
        device=plan.hardware.device,
        resident=plan.offload.resident_blocks or 1,
        source=(source or plan.offload.host_weights).value,
        dtype=plan.hardware.dtype if _casts_later(plan) else None,
        without=waiting_modulation(transformer, plan.offload),
    )


def stream(plan: Plan, transformer: MMDiT, ends: ExitStack, reporter: Reporter) -> None:
    """Enter `streamed_blocks` until `ends` are closed, without a copy of the blocks where the host has no room for one.

    A HardwareError if the settings insist on that.
    """
    try:
        ends.enter_context(streamed_blocks(plan, transformer))
    except HardwareError as error:
        if plan.settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
            raise
        reporter.warn(f"{error.message}: the blocks stay mapped from their file")
        ends.enter_context(streamed_blocks(plan, transformer, source=HostWeights.MAPPED))


def streamed_layers(plan: Plan, t5: T5Encoder) -> AbstractContextManager[StreamingFigures]:
    """Return the context in which the layers of `load_t5` come to the device and go again, each for one pass."""
    return text_encoders.streamed_layers(t5, device=plan.hardware.device, dtype=plan.hardware.dtype)


def _stacks(transformer: MMDiT) -> list[nn.ModuleList]:
    paths = [stack.module_path for stack in repeated_blocks(transformer.config)]
    return [cast(nn.ModuleList, transformer.get_submodule(path)) for path in paths]


def load_vae(plan: Plan, *, advance: Advance | None = None) -> Autoencoder:
    """Return the autoencoder; a CheckpointError for a file that is missing, broken, or does not fit the settings."""
    return load_autoencoder(
        plan.settings.vae,
        plan.weights.path(Component.VAE),
        device=plan.hardware.device,
        dtype=plan.hardware.dtype,
        advance=advance,
    )


@contextmanager
def loading(plan: Plan, component: Component, record: RunRecord) -> Iterator[Advance]:
    """Show the loading of a file of weights as part of the stage `load`."""
    total = sum(entry.nbytes for entry in open_checkpoint(plan.weights.path(component)).entries.values())
    with record.stage("load", total=total, unit=BYTES) as progress:
        yield progress.advance


T = TypeVar("T")

TextEncoders = tuple[T5Encoder, ClipEncoder]

_PARTS = {
    TEXT_ENCODERS: (Component.T5, Component.CLIP),
    TRANSFORMER: (Component.TRANSFORMER,),
    AUTOENCODER: (Component.VAE,),
}


@dataclass(frozen=True, slots=True)
class _Held:
    """A model that is loaded."""

    model: object
    form: object
    """Settings and files of the model; another value means another model."""
    device: torch.device
    num_bytes: int
    """Planned size in the memory of the device."""
    ends: ExitStack
    """Frees what it takes beside its tensors."""


class LoadedModels:
    """The text encoders, the transformer and the autoencoder, each loaded when a stage first asks for it.

    Before a stage begins, `with_room` releases what its plan does not keep beside it, and what the plan needs in
    another form: of other weights, dtype or offload. A model whose stage fails is released, too: it is in the way of no
    second attempt, and none is used that was interrupted halfway.

    Args:
        stay: whether models are of use after the run, so that all stay for which there is room.
        text_group: ranks that share the layers of T5; None: there is only this one.
        tensor_group: ranks that share each block's heads and features; None: each has all of them.
        machine_group: the ranks of this machine, which hold one copy of what is offloaded to the CPU.
    """

    def __init__(
        self,
        *,
        stay: bool = False,
        text_group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
        machine_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.prompts = PromptCache.of_user()
        """Cache of prompt embeddings from earlier runs."""
        self.text_group = text_group
        self._stay = stay
        self._tensor_group = tensor_group
        self._machine_group = machine_group
        self._held: dict[str, _Held] = {}
        self._products: LinearProductsReport | None = None
        """Errors of 8-bit products in the transformer that was loaded last."""
        self._readers: tuple[object, tuple[PromptReader, PromptReader]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()

    @property
    def is_main(self) -> bool:
        """Whether this process is alone, or rank 0."""
        return self.text_group is None or dist.get_rank() == 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded models."""
        return tuple(self._held)

    def bytes_on(self, device: torch.device) -> int:
        """Return what they take of a device's memory, as planned; all of it can be released."""
        return sum(held.num_bytes for held in self._held.values() if held.device == device)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan that keeps models beside the stages, if they are to stay and it has room for them.

        What fits is kept, and nothing is given up for it: results are the same bits.
        """
        if not self._stay or plan.settings.memory.offload is OffloadMode.MODEL:
            return plan
        loaded = {name: held.num_bytes for name, held in self._held.items() if held.device == plan.hardware.device}
        return replace(plan, stages=keep_models(plan.stages, budget=plan.budget_bytes, loaded=loaded))

    def make_room(self, plan: Plan, stage: str) -> None:
        """Release what the plan does not keep beside a stage, and what it needs in another form."""
        memory = _memory_of(plan, stage)
        kept = {MODEL_OF[stage], *(name for name, _ in memory.kept)} if memory else {MODEL_OF[stage]}
        planned = {MODEL_OF[each.name] for each in plan.stages}
        self._release(
            name
            for name, held in self._held.items()
            if name not in kept or (name in planned and held.form != _form(plan, name))
        )

    def release(self) -> None:
        """Release all of them."""
        self._release(self._held)

    def give_up_others(self, stage: str, *, for_good: bool = False) -> bool:
        """Release all but the model of a stage; returns whether there were any. `for_good`: none is to stay again."""
        others = self._held.keys() - {MODEL_OF[stage]}
        self._stay = self._stay and not for_good
        self._release(others)
        return bool(others)

    def prompt_readers(self, plan: Plan) -> tuple[PromptReader, PromptReader]:
        """Return how T5 and CLIP read prompts, without their weights where these are not loaded."""
        if TEXT_ENCODERS in self._held:
            return cast(TextEncoders, self._held[TEXT_ENCODERS].model)
        form = _form(plan, TEXT_ENCODERS)
        if self._readers is None or self._readers[0] != form:
            self._readers = form, prompt_readers(plan)
        return self._readers[1]

    @contextmanager
    def text_encoders(self, plan: Plan, record: RunRecord) -> Iterator[TextEncoders]:
        """Lend T5 and CLIP, T5's layers streamed if the plan wants it."""

        def make(ends: ExitStack) -> TextEncoders:
            with record.stage("load", total=2, unit="encoders") as progress:
                t5 = load_t5(plan, group=self.text_group)
                progress.advance()
                clip = load_clip(plan)
                progress.advance()
                if plan.offload.stream_text:
                    ends.enter_context(streamed_layers(plan, t5))
            return t5, clip

        with self._lent(TEXT_ENCODERS, plan, make) as encoders:
            yield encoders

    @contextmanager
    def transformer(self, plan: Plan, record: RunRecord) -> Iterator[MMDiT]:
        """Lend the transformer, ready to run, with as much of it on the device as planned."""

        def make(ends: ExitStack) -> MMDiT:
            errors: list[ProductError] = []
            with loading(plan, Component.TRANSFORMER, record) as advance:
                transformer = load_transformer(
                    plan,
                    group=self._tensor_group,
                    machine_group=self._machine_group,
                    advance=advance,
                    measured=errors.append,
                )
            self._products = LinearProductsReport.of(plan.offload.linear, errors) if errors else None
            if self._products is not None:
                record.reporter.note(f"8 bits: {self._products.line()}")
            if plan.settings.compile:
                compile_blocks(transformer, warn=record.reporter.warn)
            if plan.offload.mode is OffloadMode.BLOCKS:
                with record.stage("offload"):
                    stream(plan, transformer, ends, record.reporter)
            return transformer

        with self._lent(TRANSFORMER, plan, make, again=lambda model: prepare(model, plan)) as transformer:
            record.linear_products = self._products
            yield transformer

    @contextmanager
    def autoencoder(self, plan: Plan, record: RunRecord) -> Iterator[Autoencoder]:
        """Lend the autoencoder."""

        def make(_: ExitStack) -> Autoencoder:
            with loading(plan, Component.VAE, record) as advance:
                return load_vae(plan, advance=advance)

        with self._lent(AUTOENCODER, plan, make) as autoencoder:
            yield autoencoder

    @contextmanager
    def _lent(
        self,
        name: str,
        plan: Plan,
        make: Callable[[ExitStack], T],
        *,
        again: Callable[[T], object] = lambda model: None,
    ) -> Iterator[T]:
        """Lend a model, made if it is not there, or there in another form; `again` is called with one that was there.

        Raises:
            CheckpointError: its weights are missing or broken, or do not fit the settings.
            OutOfMemoryError: there is no room for it.
        """
        form = _form(plan, name)
        try:
            if name in self._held and self._held[name].form != form:
                self._release([name])
            if name in self._held:
                again(cast(T, self._held[name].model))
            else:
                self._held[name] = self._made(name, plan, form, make)
            yield cast(T, self._held[name].model)
        except BaseException:
            if name in self._held:
                self._release([name])
            raise

    def _made(self, name: str, plan: Plan, form: object, make: Callable[[ExitStack], object]) -> _Held:
        own = next((stage.own_bytes for stage in plan.stages if MODEL_OF[stage.name] == name), 0)
        with ExitStack() as ends:
            model = make(ends)
            return _Held(model, form, plan.hardware.device, own, ends.pop_all())

    def _release(self, names: Iterable[str]) -> None:
        released = [self._held.pop(name) for name in tuple(names)]
        devices = {held.device for held in released}
        while released:
            released.pop().ends.close()
        for device in devices:
            release_memory(device)


def _form(plan: Plan, name: str) -> object:
    """Return what a model is made of under a plan."""
    files = tuple((path := plan.weights.path(part), stamp_of(path)) for part in _PARTS[name])
    settings, offload = plan.settings, plan.offload
    made_of: object
    if name == TEXT_ENCODERS:
        made_of = settings.text.t5_max_length, settings.text.clip_max_length, offload.stream_text
    elif name == AUTOENCODER:
        made_of = settings.vae
    else:
        streams = offload.mode is OffloadMode.BLOCKS
        loras = tuple((lora.path, lora.scale, lora.sha256) for lora in plan.loras)
        made_of = (
            settings.model,
            settings.compile,
            loras,
            offload.fp8_storage,
            offload.linear,
            offload.modulation_on_host,
            streams and (offload.resident_blocks, offload.host_weights),
        )
    return files, plan.hardware.device, plan.hardware.dtype, made_of


def _memory_of(plan: Plan, stage: str) -> StageMemory | None:
    return next((each for each in plan.stages if each.name == stage), None)


def with_room(plan: Plan, stage: str, models: LoadedModels, record: RunRecord, *, together: bool = False) -> Plan:
    """Return a plan whose `stage` fits into the memory that a CPU has now: others may have taken some since the plan.

    What the plan does not keep beside the stage is released first. On a GPU, where an allocation that fails ends
    nothing, it is the plan itself.

    Args:
        plan: of the whole run.
        stage: which begins now.
        models: those that are loaded, which are all given up where there is no room otherwise.
        record: is told of a change.
        together: all ranks begin it now, and share the memory of their machine.

    Raises:
        OutOfMemoryError: there is too little, whatever is offloaded; where ranks share the memory, on all of them.
    """
    models.make_room(plan, stage)
    if plan.hardware.device.type != "cpu":
        return plan

    def needs(plan: Plan) -> int:
        memory = _memory_of(plan, stage)
        return max(0, memory.total_bytes - models.bytes_on(plan.hardware.device)) if memory else 0

    needed, free = needs(plan), read_private_memory().free_bytes
    if together and plan.mesh.size > 1:
        needed, free = _of_all_ranks(plan, needed)
    if needed <= free:
        return plan
    if plan.mesh.size == 1 and models.give_up_others(stage):
        plan = _keeping_none(plan)
        needed, free = needs(plan), read_private_memory().free_bytes
        if needed <= free:
            return plan
    problem = (
        f"the stage {stage} needs {gib_or_less(needed)} of memory for itself, and by now {gib_or_less(free)} are free"
    )
    if plan.mesh.size == 1:
        room = free + models.bytes_on(plan.hardware.device)
        smaller = plan.with_best_offload(min(room, plan.budget_bytes))
        if needs(smaller) <= free:
            record.reporter.warn(f"{problem}: going on with {'; '.join(smaller.offload.lines())}")
            return smaller
    raise OutOfMemoryError(problem, hint="close what else takes memory, or ask for a smaller --res or --num-frames")


def _of_all_ranks(plan: Plan, needed: int) -> tuple[int, int]:
    """Return the most that a rank of a machine needs, and the least that one can have.

    None goes on before all have looked.
    """
    all_gather_json(None)
    free = read_private_memory().free_bytes // plan.settings.parallel.ranks_per_node
    both = all_gather_json([needed, free])
    return max(needed for needed, _ in both), min(free for _, free in both)


def _keeping_none(plan: Plan) -> Plan:
    stages = (replace(stage, weight_bytes=stage.own_bytes, kept=()) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def retried(
    run: Callable[[Plan], T],
    plan: Plan,
    stage: str,
    models: LoadedModels,
    record: RunRecord,
    *,
    together: bool = True,
) -> tuple[T, Plan]:
    """Run `run`; when it runs out of memory, again without the other models, and then with stronger
    offload.

    `run` does the work of `stage`, and leaves nothing on the device when it fails. Returns its result, and the plan of
    that. The other arguments are those of `with_room`, which comes first. An OutOfMemoryError if the last attempt runs
    out of memory too, or there is nothing left to give up.
    """
    plan = with_room(plan, stage, models, record, together=together)
    try:
        return run(plan), plan
    except OutOfMemoryError as error:
        # What ran out of memory is released already.
        are_others = plan.mesh.size == 1 and bool(models.names)
        stronger = _keeping_none(plan) if are_others else plan.with_stronger_offload(stage)
        if stronger is None:
            raise
        message = error.message
    # Only here, where the exception is gone, is what the first attempt had on the device gone with its traceback.
    models.give_up_others(stage, for_good=are_others)
    release_memory(plan.hardware.device)
    if are_others:
        record.reporter.warn(f"{message}; retrying with one model loaded at a time")
        return retried(run, stronger, stage, models, record, together=together)
    record.reporter.warn(f"{message}; retrying with: {'; '.join(stronger.offload.lines())}")
    return run(stronger), stronger
