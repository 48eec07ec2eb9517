"""The memory of a training step: measured on a real step, or estimated by the same step on fake tensors."""

import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.autoencoders import new_autoencoder, vae_tiling
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.encode.encoding import EmptyPrompt, Encoders
from opensora_cli.engine.encode.frozen_parts import find_frozen_parts, frozen_dtype
from opensora_cli.engine.estimate.fake_tensors import fake_device, give_fake_weights
from opensora_cli.engine.estimate.text import clip_model, t5_model
from opensora_cli.engine.train.activations import (
    ActivationPlan,
    largest_batch_shape,
    plan_activations,
    saved_activations,
)
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask
from opensora_cli.engine.train.objectives.task import SampledBatches, SampleRng, Task
from opensora_cli.engine.train.objectives.vae import build_vae_task
from opensora_cli.engine.train.optimizer import kept_tensors
from opensora_cli.engine.train.precision import Precision
from opensora_cli.engine.train.strategy.distribution import Distribution
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.engine.train.watching.clocks import Clock
from opensora_cli.memory.activations import ActivationManager
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention import attention_backend
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.settings.train import TrainSettings, TrainTarget

WEIGHTS, AVERAGE, GRADIENTS, OPTIMIZER, FROZEN = "weights", "average", "gradients", "optimizer", "frozen parts"
ACTIVATIONS = "activations"
"""Everything else: what a forward pass keeps for the backward pass, and whatever is computed on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes of a training step."""

    peak_bytes: int
    at_peak: dict[str, int]
    """What was there at the peak: `WEIGHTS` to `ACTIVATIONS`."""
    activations_by_module: dict[str, int]
    """Of the activations at the peak, those that a module's forward pass made, by its name; backward has no name."""
    by_weight: dict[str, tuple[int, int, int, int]]
    """Name -> number of parameters, and bytes of weight, gradient and what the optimizer keeps for it."""
    held_for_backward: int
    """Activations when the forward pass of the last step has ended."""
    buffer_bytes: int
    """Size of the buffer of offloaded activations, which are part of the activations on a CPU."""
    buffer_used_bytes: int
    """The most that was in it."""
    counter: TensorBytes
    """The whole timeline."""


def estimate_training(settings: TrainSettings) -> TrainingMemory:
    """Return what `measure_training` would, on fake tensors: nothing is computed, and a few MB are allocated.
    Raises RequestError if sizes contradict each other.
    """
    plan = plan_activations(settings)
    with torch.device("meta"):
        task, frozen = _task(settings)
    with fake_device("cpu", gradients=True) as device, warnings.catch_warnings():
        # Copying the module for the average accesses its data pointers.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for module in (task.module, *frozen):
            give_fake_weights(module, device=device)
        return _steps(settings, plan, task, frozen)


def measured_steps(settings: TrainSettings) -> tuple[int, ...]:
    """Return the numbers of the steps whose memory is measured, and estimated."""
    first_clips = settings.train_vae.picture_steps if settings.target is TrainTarget.VAE else 0
    # The first step makes the optimizers' moments; a phase of single frames is measured with them, too.
    return (0, 0, first_clips) if first_clips else (0, 1)


def measure_training(settings: TrainSettings, *, limit: int | None = None) -> TrainingMemory:
    """Do the `measured_steps` with random weights, frozen parts included, and return their memory.

    Micro-batches are black clips of the largest shape, which the frozen parts encode even if the run has a cache.

    Raises:
        MemoryError: it needs more than `limit` bytes, or than there is.
        RequestError: sizes contradict each other.
        HardwareError: the host has no memory for offloaded activations.
    """
    task, frozen = _fresh_task(settings)
    return _steps(settings, plan_activations(settings), task, frozen, limit=limit)


def time_training(settings: TrainSettings) -> float:
    """Return the seconds of one step with fresh weights: the shorter of two, after one that makes the moments.

    It raises what `measure_training` raises.
    """
    task, _ = _fresh_task(settings)
    trainer = _trainer(settings, task)
    times = []
    with saved_activations(task.module, plan_activations(settings)):
        for _ in range(3):
            start = time.perf_counter()
            trainer.do_step()
            times.append(time.perf_counter() - start)
    return min(times[1:])


def _steps(
    settings: TrainSettings,
    plan: ActivationPlan | None,
    task: Task[Any],
    frozen: list[nn.Module],
    *,
    limit: int | None = None,
) -> TrainingMemory:
    with TensorBytes(limit=limit) as counter:
        trainer = _trainer(settings, _MarkingTask(task, counter))
        counter.add(list((trainer.ema or {}).values()), AVERAGE)
        counter.add(task.module, WEIGHTS)
        counter.add(_kept(trainer), OPTIMIZER)
        for module in frozen:
            counter.add(module, FROZEN)
        with saved_activations(task.module, plan) as manager, counter.watch(task.module, "model"):
            for step in measured_steps(settings):
                trainer.step = step
                trainer.do_step()
                counter.add(_gradients(trainer), GRADIENTS)
                counter.add(_kept(trainer), OPTIMIZER)
    return _memory(counter, trainer, plan, manager)


def _trainer(settings: TrainSettings, task: Task[Any]) -> Trainer[Any]:
    device = torch.device("cpu")
    return Trainer(
        task,
        _largest_batches(settings),
        loop=settings.loop.replace({"micro_batches": 1}),
        optimizer=settings.optimizer,
        precision=Precision(settings.precision, device),
        distribution=Distribution(device),
        clock=Clock(),
        reporter=SilentReporter(),
        trained_only=settings.lora.is_on,
    )


def _fresh_task(settings: TrainSettings) -> tuple[Task[Any], list[nn.Module]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.loop.seed)
        return _task(settings)


def _largest_batches(settings: TrainSettings) -> SampledBatches[Any]:
    """Return the largest micro-batch, repeated; after two of single frames, if the run has such a phase."""
    pictures = 2 if settings.target is TrainTarget.VAE and settings.train_vae.picture_steps else 0

    def make(rng: SampleRng, number: int) -> Any:
        if settings.target is TrainTarget.TEXT:
            from opensora_cli.engine.train.objectives.text import sample_captions

            return sample_captions(rng, number, batch_size=settings.text.batch_size)
        shape = largest_batch_shape(settings)
        if number < pictures:
            shape = replace(shape, batch_size=settings.train_vae.picture_batch_size, num_frames=1)
        return shape.zeros()

    return SampledBatches(make, seed=0)


def _memory(
    counter: TensorBytes, trainer: Trainer[Any], plan: ActivationPlan | None, manager: ActivationManager | None
) -> TrainingMemory:
    owners = counter.peak_by_owner()
    kept = {name: owners.pop(name, 0) for name in (WEIGHTS, AVERAGE, GRADIENTS, OPTIMIZER, FROZEN)}
    before_backward = counter.owners_at(counter.marks[-1])
    return TrainingMemory(
        peak_bytes=counter.peak_bytes,
        at_peak={**kept, ACTIVATIONS: sum(owners.values())},
        activations_by_module={name: size for name, size in owners.items() if name},
        by_weight=_by_weight(trainer),
        held_for_backward=sum(size for name, size in before_backward.items() if name not in kept),
        buffer_bytes=0 if plan is None or manager is None else plan.buffer_bytes,
        buffer_used_bytes=0 if manager is None else manager.peak_bytes,
        counter=counter,
    )


class _MarkingTask:
    """A task that marks the end of each forward pass on the timeline."""

    def __init__(self, task: Task[Any], counter: TensorBytes) -> None:
        self.module: nn.Module = task.module
        self.forward = task.forward
        self.adversary = task.adversary
        self.begin_step = task.begin_step
        self.export = task.export
        self.tokens = task.tokens
        self.samples = task.samples
        self._task = task
        self._counter = counter

    def loss(self, batch: Any, rng: SampleRng) -> tuple[Tensor, dict[str, float]]:
        """Return the task's loss."""
        loss = self._task.loss(batch, rng)
        self._counter.mark("forward")
        return loss


def _task(settings: TrainSettings) -> tuple[Task[Any], list[nn.Module]]:
    """Return the task and its frozen parts, without the weights of any file."""
    match settings.target:
        case TrainTarget.VAE:
            without_files = settings.replace({"train_vae.perceptual_files": (), "train_vae.perceptual_weight": 0.0})
            return build_vae_task(without_files, device=torch.device("cpu"), reporter=SilentReporter()), []
        case TrainTarget.TEXT:
            # Imported here, since transformers takes seconds to load.
            from opensora_cli.engine.train.objectives.text import TextTask

            return TextTask(settings.text), []
        case TrainTarget.MMDIT:
            return _mmdit_task(settings)


def _mmdit_task(settings: TrainSettings) -> tuple[MMDiTTask, list[nn.Module]]:
    model, dtype = settings.model, frozen_dtype(settings.train_mmdit, torch.device("cpu"))
    vae = new_autoencoder(settings.vae)
    frozen = [vae, *_text_encoders(settings)]
    for module in frozen:
        module.requires_grad_(False).eval().to(dtype)

    # The values of embeddings do not matter for memory, and computing them needs little beside a step.
    def t5(captions: list[str]) -> Tensor:
        return torch.zeros(len(captions), settings.text.t5_max_length, model.context_in_dim)

    def clip(captions: list[str]) -> Tensor:
        return torch.zeros(len(captions), model.vec_in_dim)

    encoders = Encoders(vae, t5=t5, clip=clip, dtype=dtype, tiling=vae_tiling(settings.vae))
    task = MMDiTTask(
        MMDiT(mmdit_config(model), attention=attention_backend(settings.train_mmdit.attention)),
        settings=settings.train_mmdit,
        grid=settings.vae.grid,
        empty_prompt=EmptyPrompt(t5([""])[0], clip([""])[0]),
        encoders=lambda: encoders,
    )
    if settings.lora.is_on:
        add_lora(task.module, settings.lora, seed=settings.loop.seed)
    return task, frozen


def _text_encoders(settings: TrainSettings) -> tuple[nn.Module, nn.Module]:
    """Return T5 and CLIP of the sizes in their folders.

    Without a folder they are those of `text`, if the transformer has its widths, else the released ones.
    """
    # Imported here, since transformers takes seconds to load.
    from opensora_cli.engine.train.objectives.text import TextTask

    files, parts, text = settings.train_mmdit.files, find_frozen_parts(settings), settings.text
    small = TextTask(text).module
    t5, clip = parts[files.t5], parts[files.clip]
    has_small_t5 = t5 is None and text.t5_width == settings.model.context_in_dim
    has_small_clip = clip is None and text.clip_width == settings.model.vec_in_dim
    return (
        small.get_submodule("t5") if has_small_t5 else t5_model(t5),
        small.get_submodule("clip") if has_small_clip else clip_model(clip),
    )


def _kept(trainer: Trainer[Any]) -> list[Tensor]:
    return [tensor for optimizer in _optimizers(trainer) for _, tensor in kept_tensors(optimizer)]


def _gradients(trainer: Trainer[Any]) -> list[Tensor]:
    optimized = (
        weight for optimizer in _optimizers(trainer) for group in optimizer.param_groups for weight in group["params"]
    )
    weights = (*trainer.task.module.parameters(), *optimized)
    return [weight.grad for weight in weights if weight.grad is not None]


def _optimizers(trainer: Trainer[Any]) -> list[torch.optim.Optimizer]:
    return [optimizer for learner in trainer.learners.values() for optimizer in learner.optimizers]


def _by_weight(trainer: Trainer[Any]) -> dict[str, tuple[int, int, int, int]]:
    kept: dict[int, int] = {}
    for optimizer in _optimizers(trainer):
        for weight, tensor in kept_tensors(optimizer):
            kept[id(weight)] = kept.get(id(weight), 0) + tensor.nbytes
    return {
        name: (weight.numel(), weight.nbytes, 0 if weight.grad is None else weight.grad.nbytes, kept.get(id(weight), 0))
        for name, weight in trainer.task.module.named_parameters()
    }
