"""The models that are loaded: lent to stages, kept while there is room, and given up where there is none."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Self, TypeVar, cast

import torch
import torch.distributed as dist

from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.hardware import OutOfMemoryError, release_memory
from opensora_cli.engine.components.linear_products import LinearProductsReport
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.encode.prompt_cache import PromptCache
from opensora_cli.engine.estimate.offload import (
    AUTOENCODER,
    MODEL_OF,
    TEXT_ENCODERS,
    TRANSFORMER,
    StageMemory,
    keep_models,
)
from opensora_cli.engine.generate import load
from opensora_cli.engine.generate.execution_plan import ExecutionPlan, gib_or_less
from opensora_cli.engine.generate.stages import RunRecord
from opensora_cli.memory.eight_bit_products import ProductError
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.text.encoders import ClipEncoder, PromptReader, T5Encoder
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.enums import OffloadMode

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
    """What it was made of: where that changes, it is another one."""
    device: torch.device
    num_bytes: int
    """Of the device's memory, as planned."""
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
        """What is known of prompts from earlier runs."""
        self.text_group = text_group
        self._stay = stay
        self._tensor_group = tensor_group
        self._machine_group = machine_group
        self._held: dict[str, _Held] = {}
        self._products: LinearProductsReport | None = None
        """Of the transformer that was loaded last."""
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
        """Those that are loaded."""
        return tuple(self._held)

    def bytes_on(self, device: torch.device) -> int:
        """Return what they take of a device's memory, as planned; all of it can be released."""
        return sum(held.num_bytes for held in self._held.values() if held.device == device)

    def planned(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan that keeps models beside the stages, if they are to stay and it has room for them.

        What fits is kept, and nothing is given up for it: results are the same bits.
        """
        if not self._stay or plan.settings.memory.offload is OffloadMode.MODEL:
            return plan
        loaded = {name: held.num_bytes for name, held in self._held.items() if held.device == plan.hardware.device}
        return replace(plan, stages=keep_models(plan.stages, budget=plan.budget_bytes, loaded=loaded))

    def make_room(self, plan: ExecutionPlan, stage: str) -> None:
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

    def prompt_readers(self, plan: ExecutionPlan) -> tuple[PromptReader, PromptReader]:
        """Return how T5 and CLIP read prompts, without their weights where these are not loaded."""
        if TEXT_ENCODERS in self._held:
            return cast(TextEncoders, self._held[TEXT_ENCODERS].model)
        form = _form(plan, TEXT_ENCODERS)
        if self._readers is None or self._readers[0] != form:
            self._readers = form, load.prompt_readers(plan)
        return self._readers[1]

    @contextmanager
    def text_encoders(self, plan: ExecutionPlan, record: RunRecord) -> Iterator[TextEncoders]:
        """Lend T5 and CLIP, T5's layers streamed if the plan wants it."""

        def make(ends: ExitStack) -> TextEncoders:
            with record.stage("load", total=2, unit="encoders") as progress:
                t5 = load.load_t5(plan, group=self.text_group)
                progress.advance()
                clip = load.load_clip(plan)
                progress.advance()
                if plan.offload.stream_text:
                    ends.enter_context(load.streamed_layers(plan, t5))
            return t5, clip

        with self._lent(TEXT_ENCODERS, plan, make) as encoders:
            yield encoders

    @contextmanager
    def transformer(self, plan: ExecutionPlan, record: RunRecord) -> Iterator[MMDiT]:
        """Lend the transformer, ready to run, with as much of it on the device as planned."""

        def make(ends: ExitStack) -> MMDiT:
            errors: list[ProductError] = []
            with load.loading(plan, Component.TRANSFORMER, record) as advance:
                transformer = load.load_transformer(
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
                    load.stream(plan, transformer, ends, record.reporter)
            return transformer

        with self._lent(TRANSFORMER, plan, make, again=lambda model: load.prepare(model, plan)) as transformer:
            record.linear_products = self._products
            yield transformer

    @contextmanager
    def autoencoder(self, plan: ExecutionPlan, record: RunRecord) -> Iterator[Autoencoder]:
        """Lend the autoencoder."""

        def make(_: ExitStack) -> Autoencoder:
            with load.loading(plan, Component.VAE, record) as advance:
                return load.load_vae(plan, advance=advance)

        with self._lent(AUTOENCODER, plan, make) as autoencoder:
            yield autoencoder

    @contextmanager
    def _lent(
        self,
        name: str,
        plan: ExecutionPlan,
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

    def _made(self, name: str, plan: ExecutionPlan, form: object, make: Callable[[ExitStack], object]) -> _Held:
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


def _form(plan: ExecutionPlan, name: str) -> object:
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


def _memory_of(plan: ExecutionPlan, stage: str) -> StageMemory | None:
    return next((each for each in plan.stages if each.name == stage), None)


def with_room(
    plan: ExecutionPlan, stage: str, models: LoadedModels, record: RunRecord, *, together: bool = False
) -> ExecutionPlan:
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

    def needs(plan: ExecutionPlan) -> int:
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
        smaller = plan.with_offload(plan.fitting.choose(min(room, plan.budget_bytes)))
        if needs(smaller) <= free:
            record.reporter.warn(f"{problem}: going on with {'; '.join(smaller.offload.lines())}")
            return smaller
    raise OutOfMemoryError(problem, hint="close what else takes memory, or ask for a smaller --res or --num-frames")


def _of_all_ranks(plan: ExecutionPlan, needed: int) -> tuple[int, int]:
    """Return the most that a rank of a machine needs, and the least that one can have.

    None goes on before all have looked.
    """
    all_gather_json(None)
    free = read_private_memory().free_bytes // plan.settings.parallel.ranks_per_node
    both = all_gather_json([needed, free])
    return max(needed for needed, _ in both), min(free for _, free in both)


def _keeping_none(plan: ExecutionPlan) -> ExecutionPlan:
    stages = (replace(stage, weight_bytes=stage.own_bytes, kept=()) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def retried(
    run: Callable[[ExecutionPlan], T],
    plan: ExecutionPlan,
    stage: str,
    models: LoadedModels,
    record: RunRecord,
    *,
    together: bool = True,
) -> tuple[T, ExecutionPlan]:
    """Run `run`; when it runs out of memory, again without the other models, then with smaller batches, and then with
    stronger offload.

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
    change = "; ".join(stronger.offload.lines()) or "one clip at a time"
    record.reporter.warn(f"{message}; retrying with: {change}")
    if _clips_together(stronger) < _clips_together(plan):
        return retried(run, stronger, stage, models, record, together=together)
    return run(stronger), stronger


def _clips_together(plan: ExecutionPlan) -> int:
    return plan.offload.batch_size + plan.offload.decode_batch_size
