"""The loaded models of a run: provided to stages, kept while they fit, released, and retried in less memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar, cast

import torch

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.device import release_memory
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import BYTES
from opensora_cli.engine.components import text_encoders
from opensora_cli.engine.components.architectures import load_autoencoder
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.components.linear_products import LinearProductsReport
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.encode.prompt_cache import PromptCache
from opensora_cli.engine.estimate.offload import (
    AUTOENCODER,
    DECODE,
    DENOISE,
    MODEL_OF,
    TEXT_ENCODERS,
    TRANSFORMER,
    keep_models,
)
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.loading import load_t5, load_transformer, prepare, streamed_blocks
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.process import ALONE, OneProcess
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.enums import HostWeights, OffloadMode

if TYPE_CHECKING:
    from opensora_cli.memory.eight_bit import ProductError

T = TypeVar("T")

TextEncoders = tuple[T5Encoder, ClipEncoder]

_PARTS = {
    TEXT_ENCODERS: (Component.T5, Component.CLIP),
    TRANSFORMER: (Component.TRANSFORMER,),
    AUTOENCODER: (Component.VAE,),
}


@dataclass(frozen=True, slots=True)
class _Held:
    """Loaded model."""

    model: object
    key: object
    """Settings and files of the model; another value means another model."""
    device: torch.device
    num_bytes: int
    """Planned size in the memory of the device."""
    ends: ExitStack
    """Cleanup of resources other than the tensors of the model."""


class LoadedModels:
    """The text encoders, the transformer and the autoencoder, each loaded when a stage first asks for it.

    Before a stage begins, `retried` releases the models that its plan does not keep beside it, and models that
    the plan needs in another form: other weights, dtype or offload. A model whose stage fails is released, too.

    Args:
        stay: whether models stay loaded after the run if there is room.
        ranks: processes of the run, each of which loads its part of T5 and of the transformer.
    """

    def __init__(self, *, stay: bool = False, ranks: OneProcess = ALONE) -> None:
        self.ranks = ranks
        self.prompts = PromptCache.of_user()
        """Cache of prompt embeddings from earlier runs."""
        self._stay = stay
        self._held: dict[str, _Held] = {}
        self._products: LinearProductsReport | None = None
        """Errors of 8-bit products in the transformer that was loaded last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded models."""
        return tuple(self._held)

    def bytes_on(self, device: torch.device) -> int:
        """Return the planned size of all loaded models in a device's memory; all of it can be released."""
        return sum(held.num_bytes for held in self._held.values() if held.device == device)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan that keeps models beside the stages, if models stay after a run and there is room.

        Results stay bitwise identical: only models that fit without other changes are kept.
        """
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
        """Release all models."""
        self._release(self._held)

    def release_others(self, stage: str, *, for_good: bool = False) -> bool:
        """Release all models except the model of a stage; return whether any was released.

        With `for_good`, later runs release their models at their end.
        """
        others = self._held.keys() - {MODEL_OF[stage]}
        self._stay = self._stay and not for_good
        self._release(others)
        return bool(others)

    def text_encoders(self, plan: Plan, events: Events) -> AbstractContextManager[TextEncoders]:
        """Provide T5 and CLIP, with T5's layers streamed if the plan says so."""
        device, dtype = plan.hardware.device, plan.hardware.dtype

        def load(ends: ExitStack) -> TextEncoders:
            with events.stage("load", total=2, unit="encoders") as progress:
                t5 = load_t5(plan, group=self.ranks.text_group)
                progress.advance()
                clip = text_encoders.load_clip(
                    plan.weights.path(Component.CLIP),
                    max_length=plan.settings.text.clip_max_length,
                    device=device,
                    dtype=dtype,
                )
                progress.advance()
                if plan.offload.stream_text:
                    ends.enter_context(text_encoders.streamed_layers(t5, device=device, dtype=dtype))
            return t5, clip

        return self._provide(TEXT_ENCODERS, plan, load)

    def transformer(self, plan: Plan, events: Events) -> AbstractContextManager[MMDiT]:
        """Provide the transformer, ready to run, with as much of it on the device as planned."""

        def load(ends: ExitStack) -> MMDiT:
            errors: list[ProductError] = []
            with _loading(plan, Component.TRANSFORMER, events) as advance:
                transformer = load_transformer(
                    plan,
                    group=self.ranks.of(plan).tensor_group,
                    machine_group=self.ranks.machine_group,
                    advance=advance,
                    measured=errors.append,
                )
            self._products = LinearProductsReport.of(plan.offload.linear, errors) if errors else None
            events.linear_products = self._products
            if self._products is not None:
                events.reporter.note(f"8 bits: {self._products.line()}")
            if plan.settings.compile:
                compile_blocks(transformer, warn=events.reporter.warn)
            if plan.offload.mode is not OffloadMode.BLOCKS:
                return transformer
            with events.stage("offload"):
                try:
                    ends.enter_context(streamed_blocks(plan, transformer))
                except HardwareError as error:
                    if plan.settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
                        raise
                    events.reporter.warn(f"{error.message}: the blocks stay mapped from their file")
                    ends.enter_context(streamed_blocks(plan, transformer, source=HostWeights.MAPPED))
            return transformer

        def reuse(transformer: MMDiT) -> None:
            prepare(transformer, plan)
            events.linear_products = self._products

        return self._provide(TRANSFORMER, plan, load, reuse=reuse)

    def autoencoder(self, plan: Plan, events: Events) -> AbstractContextManager[Autoencoder]:
        """Provide the autoencoder."""

        def load(_: ExitStack) -> Autoencoder:
            with _loading(plan, Component.VAE, events) as advance:
                return load_autoencoder(
                    plan.settings.vae,
                    plan.weights.path(Component.VAE),
                    device=plan.hardware.device,
                    dtype=plan.hardware.dtype,
                    advance=advance,
                )

        return self._provide(AUTOENCODER, plan, load)

    @contextmanager
    def _provide(
        self,
        name: str,
        plan: Plan,
        load: Callable[[ExitStack], T],
        *,
        reuse: Callable[[T], object] = lambda model: None,
    ) -> Iterator[T]:
        """Provide a model, loaded if it is missing or has another form; `reuse` is called with a model that stays."""
        key = _model_key(plan, name)
        try:
            if name in self._held and self._held[name].key != key:
                self._release([name])
            if name in self._held:
                reuse(cast(T, self._held[name].model))
            else:
                own = next((stage.own_bytes for stage in plan.stages if MODEL_OF[stage.name] == name), 0)
                with ExitStack() as ends:
                    model = load(ends)
                    self._held[name] = _Held(model, key, plan.hardware.device, own, ends.pop_all())
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
    """Show the loading of a file of weights as part of the stage `load`."""
    total = sum(entry.nbytes for entry in open_checkpoint(plan.weights.path(component)).entries.values())
    with events.stage("load", total=total, unit=BYTES) as progress:
        yield progress.advance


def _model_key(plan: Plan, name: str) -> object:
    """Return the files and the settings on which a model depends."""
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
            plan.mesh.tensor,
        )
    return files, plan.hardware.device, plan.hardware.dtype, made_of


def _one_at_a_time(plan: Plan) -> Plan:
    """Return a plan that keeps no model beside a stage."""
    stages = (replace(stage, weight_bytes=stage.own_bytes, kept=()) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


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
        stronger = _one_at_a_time(plan) if are_others else plan.with_stronger_offload(stage)
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
