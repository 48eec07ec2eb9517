"""Profiling a generation: each of its stages runs for a moment with random weights."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.device import (
    allocated_bytes,
    has_peaks,
    peak_allocated_bytes,
    release_memory,
    start_peak_memory,
    timed,
)
from opensora_cli.core.limits import read_private_memory
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.components.architectures import (
    STREAMED_LAYERS,
    autoencoder_on_meta,
    transformer_on_meta,
    vae_tiling,
)
from opensora_cli.engine.components.hardware import Hardware, unless_out_of_memory
from opensora_cli.engine.components.linear_products import use_in_block
from opensora_cli.engine.components.loras import add_fake_loras, lora_ranks
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.fake_tensors import replace_weights
from opensora_cli.engine.estimate.generation import reference_frames
from opensora_cli.engine.estimate.offload import DECODE, DENOISE, ENCODE, TEXT
from opensora_cli.engine.generate.decode import decode_latents
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.models import host_modulation, move_except, prepare, streamed_blocks
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.references import Reference, encode_references
from opensora_cli.engine.mem_profile.report import StageProfile, Timeline, mib, module_shares, parts_of
from opensora_cli.memory.checkpointing import blocks_of
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.monitor import ModuleTimes, Spread
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.devices import OffloadMode

MOST_ON_A_CPU = 4 * 2**30
"""Limit in bytes; with much more, a CPU would compute for hours."""
_WEIGHTS, _BESIDE_WEIGHTS = "weights", "data and activations"
_READY = "weights are loaded"
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_RANDOM_NUMBERS = 2**20
_STEPS = 2
"""Sampling steps to run: the second and later steps hold latents besides the noise."""


class Measured(NamedTuple):
    """Memory and time of a stage."""

    peak_bytes: int
    counter: TensorBytes
    parameters: Mapping[str, tuple[int, int]]
    """Name of a weight -> number of parameters and bytes."""
    times: Mapping[str, Spread]
    """Times of the stage, then of blocks, in the runs after the counted one."""


def why_not_measured(needed: int, hardware: Hardware, *, weights: int = 0) -> str | None:
    """Return the reason not to run a job that needs `needed` bytes of the device; None means to run it.

    `weights` are the bytes of all weights that the host holds for streaming; 0 means no streaming.
    """
    if not hardware.is_here or not hardware.memory_is_known:
        return f"{hardware.device_name} is not in this machine"
    if needed > hardware.free_bytes:
        return f"it needs {mib(needed)}, and {mib(hardware.free_bytes)} are free"
    if hardware.device.type == "cpu":
        if max(needed, weights) > MOST_ON_A_CPU:
            return f"a CPU would take too long: only up to {mib(MOST_ON_A_CPU)} are run without a GPU"
        return None
    free = read_private_memory().free_bytes
    if weights > free:
        return f"random weights in the host's memory need {mib(weights)}, and {mib(free)} are free"
    return None


def profile_generation(plan: Plan, *, runs: int = 0, reporter: Reporter) -> tuple[StageProfile, ...]:
    """Return the profiles of all stages of a plan.

    Measured stages are timed in `runs` more runs. Too large or slow stages are only predicted. Weights may be missing.
    """
    profiles: list[StageProfile] = []
    streamed = {TEXT: Component.T5} if plan.offload.stream_text else {}
    if plan.offload.mode is OffloadMode.BLOCKS:
        streamed[DENOISE] = Component.TRANSFORMER
    with reporter.stage("profile", total=len(plan.stages), unit="stages") as progress:
        for stage in plan.stages:
            weights, beside, on_host = stage.weight_bytes, stage.data_bytes + stage.activation_bytes, 0
            if stage.name in streamed:
                on_host = plan.parameters[streamed[stage.name]] * plan.hardware.dtype.itemsize
            if plan.hardware.device.type == "cpu":
                # Random weights are in memory, not mapped from a file.
                weights += on_host or stage.mapped_bytes
            reason = why_not_measured(weights + beside, plan.hardware, weights=on_host)
            if plan.mesh.size > 1:
                reason = f"this is one of {plan.mesh.size} ranks, and the others do not run"
            result = None
            if reason is None:
                result = unless_out_of_memory(partial(measure_stage, plan, stage.name, runs=runs))
                release_memory(plan.hardware.device)
            sizes = {_WEIGHTS: weights, _BESIDE_WEIGHTS: beside}
            profile = partial(StageProfile, name=stage.name, predicted_bytes=weights + beside)
            if result is None:
                profiles.append(profile(parts=parts_of(sizes), not_measured=reason or "out of memory"))
            else:
                counter, held = result.counter, result.counter.marks[0].live_bytes
                measured = profile(
                    parts=parts_of(sizes, {_WEIGHTS: held, _BESIDE_WEIGHTS: result.peak_bytes - held}),
                    measured_bytes=result.peak_bytes,
                    modules=module_shares(result.parameters, counter.peak_by_owner()),
                    timeline=Timeline.of(counter),
                    times=result.times,
                )
                profiles.append(measured)
            progress.advance()
    return tuple(profiles)


def measure_stage(plan: Plan, name: str, *, runs: int = 0) -> Measured:
    """Run one stage with random weights, and return its measurements. Sampling runs two steps.

    On CUDA the peak is the allocator's, without earlier allocations; on a CPU it is the peak of counted tensors. Then
    `runs` more runs are timed without counting.
    """
    device = plan.hardware.device
    before = allocated_bytes(device) if has_peaks(device) else 0
    with torch.inference_mode(), ExitStack() as stack:
        with TensorBytes(device_type=device.type) as counter, ExitStack() as watched:
            models, run = _STAGES[name](plan, stack)
            for title, model in models.items():
                watched.enter_context(counter.watch(model, title))
            counter.mark(_READY)
            counter.reset_peak()
            start_peak_memory(device)
            timed(run, device)
            counter.mark("done")
        peak = peak_allocated_bytes(device) - before if has_peaks(device) else counter.peak_bytes
        parameters = {
            f"{title}.{path}": (weight.numel(), weight.nbytes)
            for title, model in models.items()
            for path, weight in model.named_parameters()
        }
        blocks = {path: block for title, model in models.items() for path, block in blocks_of(model, title).items()}
        times = ModuleTimes(device)
        with times.watch(blocks):
            seconds = [timed(run, device) for _ in range(runs)]
    return Measured(peak, counter, parameters, {name: Spread.of(seconds), **times.spreads()} if seconds else {})


def random_transformer(plan: Plan) -> MMDiT:
    """Return the transformer of `models.load_transformer`, with random weights."""
    offload, device, dtype = plan.offload, plan.hardware.device, plan.hardware.dtype
    transformer = transformer_on_meta(plan.settings.model).to(dtype).requires_grad_(False).eval()
    add_fake_loras(transformer, lora_ranks(plan.loras))
    for layer in host_modulation(transformer, offload):
        fill_randomly(layer, torch.device("cpu"))
    streams = offload.mode is OffloadMode.BLOCKS
    if streams or offload.in_8_bits:
        for stack in repeated_blocks(transformer.config):
            for block in transformer.get_submodule(stack.module_path).children():
                fill_randomly(block, torch.device("cpu"))
                if offload.linear is not LinearProducts.EXACT:
                    use_in_block(block, stack, offload.linear)
                if offload.fp8_storage:
                    store_in_fp8(block)
                if not streams:
                    move_except(host_modulation(transformer, offload), block, device)
    prepare(transformer, plan)
    return fill_randomly(transformer, device)


def fill_randomly(module: ModuleT, device: torch.device) -> ModuleT:
    """Replace meta tensors by frozen random weights on `device`, in place, that keep outputs finite."""
    # An autoencoder that trains decodes all frames at once.
    module.requires_grad_(False)
    replace_weights(module, lambda old: _filled(torch.empty_like(old, device=device)) if old.is_meta else old)
    return module


def _filled(weight: torch.Tensor) -> torch.Tensor:
    if not weight.is_floating_point():
        return weight.zero_()
    # The numbers repeat, because billions of random numbers take a host minutes.
    pieces = torch.split(weight.view(-1), _RANDOM_NUMBERS)
    pieces[0].normal_(std=0.02)
    for piece in pieces[1:]:
        piece.copy_(pieces[0][: len(piece)])
    return weight


Run = Callable[[], object]


def _text(plan: Plan, stack: ExitStack) -> tuple[dict[str, nn.Module], Run]:
    device, dtype, settings = plan.hardware.device, plan.hardware.dtype, plan.settings.text
    with torch.device("meta"):
        t5 = T5Model(T5Sizes.of(plan.weights.paths.get(Component.T5))).to(dtype).eval()
        clip = ClipTextModel(ClipSizes.of(plan.weights.paths.get(Component.CLIP))).to(dtype).eval()
    if plan.offload.stream_text:
        layers = fill_randomly(t5.layers, torch.device("cpu"))
        fill_randomly(t5, device)
        stack.enter_context(stream_blocks([layers], device=device, resident=STREAMED_LAYERS, source="mapped"))
    models = {"t5": fill_randomly(t5, device), "clip": fill_randomly(clip, device)}

    def run() -> None:
        t5_ids, clip_ids = (
            torch.zeros(2, length, dtype=torch.int64, device=device)
            for length in (settings.t5_max_length, min(settings.clip_max_length, clip.sizes.max_length))
        )
        states = t5(t5_ids)
        pooled = clip(clip_ids)
        del states, pooled

    return models, run


def _encode(plan: Plan, stack: ExitStack) -> tuple[dict[str, nn.Module], Run]:
    vae, tiling = _vae(plan), vae_tiling(plan.settings.vae)
    references = [Reference(torch.zeros(3, frames, plan.height, plan.width), True) for frames in reference_frames(plan)]
    return {"vae": vae}, lambda: encode_references(references, vae, tiling=tiling)


def _denoise(plan: Plan, stack: ExitStack) -> tuple[dict[str, nn.Module], Run]:
    device, dtype, settings = plan.hardware.device, plan.hardware.dtype, plan.settings
    transformer = random_transformer(plan)
    models: dict[str, nn.Module] = {"transformer": transformer}
    if plan.offload.mode is OffloadMode.BLOCKS:
        stack.enter_context(streamed_blocks(plan, transformer))
    elif plan.mode.needs_reference and plan.offload.mode is OffloadMode.NONE:
        models["vae"] = _vae(plan)

    def run() -> object:
        embeds = PromptEmbeds(
            torch.zeros(2, settings.text.t5_max_length, settings.model.context_in_dim, device=device, dtype=dtype),
            torch.zeros(2, settings.model.vec_in_dim, device=device, dtype=dtype),
        )
        latents = None
        if plan.mode.needs_reference:
            latents = [torch.zeros(plan.latent_shape, device=device, dtype=dtype)] * 2
        short = replace(plan, timesteps=plan.timesteps[: _STEPS + 1])
        return sample_latents(short, transformer, embeds, latents, seed=0)

    return models, run


def _decode(plan: Plan, stack: ExitStack) -> tuple[dict[str, nn.Module], Run]:
    vae = _vae(plan)

    def run() -> None:
        for pieces_THWC in decode_latents(plan, vae, torch.zeros(plan.latent_shape, dtype=plan.hardware.dtype)):
            del pieces_THWC

    return {"vae": vae}, run


def _vae(plan: Plan) -> Autoencoder:
    vae = autoencoder_on_meta(plan.settings.vae).to(plan.hardware.dtype).eval()
    return fill_randomly(vae, plan.hardware.device)


_STAGES: dict[str, Callable[[Plan, ExitStack], tuple[dict[str, nn.Module], Run]]] = {
    TEXT: _text,
    ENCODE: _encode,
    DENOISE: _denoise,
    DECODE: _decode,
}
