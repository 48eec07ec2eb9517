"""What a generation will do, worked out before any weight is read: settings and hardware become an `ExecutionPlan`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.configs import count_parameters
from opensora_cli.engine.hardware import GIB, Hardware, pick_hardware
from opensora_cli.engine.sampling.conditioning import ConditionMode, ReferenceLengths, condition_mode
from opensora_cli.engine.sampling.guidance import Guidance, count_evaluations
from opensora_cli.engine.sampling.schedule import flow_timesteps, latent_size
from opensora_cli.engine.sampling.sizes import image_size
from opensora_cli.engine.weights import ALL_COMPONENTS, Component, WeightFiles, find_weights
from opensora_cli.settings.generate import GenerateSettings

PLAN_SCHEMA = "osora.plan/1"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory that one stage needs for certain: weights, and what goes in and out. Activations come on top."""

    name: str
    weight_bytes: int
    data_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.weight_bytes + self.data_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlan:
    """Everything that is decided before a generation begins."""

    settings: GenerateSettings
    """With the condition mode filled in."""
    hardware: Hardware
    weights: WeightFiles
    mode: ConditionMode
    lengths: ReferenceLengths
    guidance: Guidance
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    latent_shape: tuple[int, int, int, int]
    """(C, T, H, W) of one sample."""
    timesteps: tuple[float, ...]
    evaluations_per_sample: int
    """Model evaluations that the sampling of one video takes; 0 where saved latents are decoded."""
    stages: tuple[StageMemory, ...]

    @property
    def decodes_only(self) -> bool:
        """Whether saved latents are decoded, and nothing is sampled."""
        return self.settings.from_latents is not None

    @property
    def components(self) -> tuple[Component, ...]:
        """The parts whose weights are read."""
        return (Component.VAE,) if self.decodes_only else ALL_COMPONENTS

    @property
    def num_samples(self) -> int:
        """How many videos are made."""
        return 1 if self.decodes_only else self.settings.sampling.num_samples

    @property
    def tokens_per_frame(self) -> int:
        """Packed tokens of one latent frame."""
        return self.latent_shape[2] * self.latent_shape[3] // self.settings.model.patch_size**2

    @property
    def video_tokens(self) -> int:
        """Packed tokens of one sample."""
        return self.tokens_per_frame * self.latent_shape[1]

    @property
    def latent_bytes(self) -> int:
        """Size of one sample's latents, in memory and on disk."""
        return prod(self.latent_shape) * self.hardware.dtype.itemsize

    @property
    def peak_bytes(self) -> int:
        """The most memory that a stage needs for certain: weights and data, without activations."""
        return max(stage.total_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether that much is free."""
        return self.peak_bytes <= self.hardware.free_bytes

    def require_fit(self) -> None:
        """Raise HardwareError if the weights and data of some stage need more memory than is free."""
        if self.fits:
            return
        worst = max(self.stages, key=lambda stage: stage.total_bytes)
        hardware = self.hardware
        raise HardwareError(
            f"weights and latents need {_size(worst.total_bytes)} in the stage {worst.name}, "
            f"and {hardware.device} ({hardware.device_name}) has {_size(hardware.free_bytes)} free",
            hint=self._what_would_fit(),
        )

    def _what_would_fit(self) -> str:
        if self.hardware.dtype is torch.float32 and self.peak_bytes // 2 <= self.hardware.free_bytes:
            return f"--dtype bfloat16 needs {_size(self.peak_bytes // 2)}"
        return "use a device with more memory, or --model demo"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a document of the schema `osora.plan/1`."""
        settings, hardware = self.settings, self.hardware
        return {
            "schema": PLAN_SCHEMA,
            "model": settings.model.name.value,
            "device": str(hardware.device),
            "device_name": hardware.device_name,
            "dtype": str(hardware.dtype).removeprefix("torch."),
            "height": self.height,
            "width": self.width,
            "num_frames": settings.video.num_frames,
            "fps": settings.video.fps,
            "num_samples": self.num_samples,
            "condition_mode": self.mode.name,
            "latent_shape": list(self.latent_shape),
            "video_tokens": self.video_tokens,
            "text_tokens": settings.text.t5_max_length,
            "num_inference_steps": len(self.timesteps) - 1,
            "timesteps": list(self.timesteps),
            "model_evaluations": self.evaluations_per_sample * self.num_samples,
            "latents_gib": self.latent_bytes / GIB,
            "stages": [
                {
                    "name": stage.name,
                    "weights_gib": stage.weight_bytes / GIB,
                    "data_gib": stage.data_bytes / GIB,
                    "total_gib": stage.total_bytes / GIB,
                }
                for stage in self.stages
            ],
            "peak_gib": self.peak_bytes / GIB,
            "free_gib": hardware.free_bytes / GIB,
            "fits": self.fits,
            "weights": {component.value: str(path) for component, path in self.weights.paths.items()},
            "missing_weights": [name for names in self.weights.missing.values() for name in names],
            "settings": settings.model_dump(mode="json"),
        }

    def lines(self) -> list[str]:
        """Return the plan for people."""
        settings, hardware = self.settings, self.hardware
        video = settings.video
        channels, frames, rows, columns = self.latent_shape
        dtype = str(hardware.dtype).removeprefix("torch.")
        memory = ", ".join(f"{stage.name} {_size(stage.total_bytes)}" for stage in self.stages)
        found = [f"{component}: {path}" for component, path in self.weights.paths.items()]
        missing = [name for names in self.weights.missing.values() for name in names]
        return [
            f"model     {settings.model.name} on {hardware.device} ({hardware.device_name}), {dtype}",
            f"video     {self.num_samples} x {self.width}x{self.height}, {video.num_frames} frames at {video.fps} fps",
            f"latents   {channels}x{frames}x{rows}x{columns}, {_size(self.latent_bytes)} a sample",
            f"tokens    {self.video_tokens} video + {settings.text.t5_max_length} text",
            f"sampling  {self.mode.name}, {len(self.timesteps) - 1} steps, "
            f"{self.evaluations_per_sample * self.num_samples} model evaluations",
            f"memory    {memory} (weights and data; activations come on top)",
            f"peak      {_size(self.peak_bytes)} of {_size(hardware.free_bytes)} free: "
            f"{'fits' if self.fits else 'does not fit'}",
            *(f"weights   {line}" for line in found),
            *(f"missing   {line}" for line in missing),
        ]


def make_plan(settings: GenerateSettings) -> ExecutionPlan:
    """Return the plan for `settings` on this machine.

    Neither weights nor enough memory are needed: see `WeightFiles.require` and `ExecutionPlan.require_fit`.

    Args:
        settings: with the condition mode filled in (`references.with_mode`).

    Raises:
        RequestError: sizes that contradict each other.
        HardwareError: there is no such device.
    """
    hardware = pick_hardware(settings.runtime.device, settings.runtime.dtype)
    weights = find_weights(settings)
    height, width = _pixel_size(settings)
    rows, columns = latent_size(
        height,
        width,
        spatial_compression=settings.vae.spatial_compression_ratio,
        patch_size=settings.model.patch_size,
    )
    latent_shape = (settings.vae.latent_channels, settings.num_latent_frames, rows, columns)
    mode = condition_mode(settings.condition.mode or "t2v", num_latent_frames=settings.num_latent_frames)
    lengths = ReferenceLengths(video=settings.condition.video_latent_frames, easy=settings.condition.easy_latent_frames)
    guidance = guidance_of(settings)
    sampling = settings.sampling
    return ExecutionPlan(
        settings=settings,
        hardware=hardware,
        weights=weights,
        mode=mode,
        lengths=lengths,
        guidance=guidance,
        height=height,
        width=width,
        latent_shape=latent_shape,
        timesteps=tuple(
            flow_timesteps(
                sampling.num_inference_steps,
                tokens_per_frame=rows * columns // settings.model.patch_size**2,
                num_latent_frames=settings.num_latent_frames,
                flow_shift=sampling.flow_shift,
            )
        ),
        evaluations_per_sample=_evaluations(settings, guidance, mode),
        stages=_stages(
            settings, hardware, weights, mode=mode, lengths=lengths, latent_shape=latent_shape, size=(height, width)
        ),
    )


def guidance_of(settings: GenerateSettings) -> Guidance:
    """Return the guidance that `settings` ask for."""
    sampling = settings.sampling
    return Guidance(
        guidance_scale=sampling.guidance_scale,
        image_guidance_scale=sampling.image_guidance_scale,
        text_oscillation=sampling.text_oscillation,
        image_oscillation=sampling.image_oscillation,
        temporal_image_scaling=sampling.temporal_image_scaling,
    )


def _pixel_size(settings: GenerateSettings) -> tuple[int, int]:
    video = settings.video
    if video.height is not None and video.width is not None:
        return video.height, video.width
    return image_size(video.resolution, video.aspect_ratio, multiple=settings.size_multiple)


def _evaluations(settings: GenerateSettings, guidance: Guidance, mode: ConditionMode) -> int:
    if settings.from_latents is not None:
        return 0
    if settings.model.guidance_embed:
        return settings.sampling.num_inference_steps
    return count_evaluations(
        guidance,
        mode=mode,
        num_inference_steps=settings.sampling.num_inference_steps,
        num_latent_frames=settings.num_latent_frames,
    )


def _stages(
    settings: GenerateSettings,
    hardware: Hardware,
    weights: WeightFiles,
    *,
    mode: ConditionMode,
    lengths: ReferenceLengths,
    latent_shape: tuple[int, int, int, int],
    size: tuple[int, int],
) -> tuple[StageMemory, ...]:
    item = hardware.dtype.itemsize
    weight_bytes: Mapping[Component, int] = {
        component: count * item for component, count in count_parameters(settings, weights).items()
    }
    latents = prod(latent_shape) * item
    pixels = 3 * settings.video.num_frames * prod(size) * item
    prompts = 2 * (settings.text.t5_max_length * settings.model.context_in_dim + settings.model.vec_in_dim) * item
    vae = weight_bytes[Component.VAE]
    decode = StageMemory("decode", vae, latents + pixels)
    if settings.from_latents is not None:
        return (decode,)
    # The latents, what they are conditioned on, and the velocity.
    denoise = StageMemory("denoise", weight_bytes[Component.TRANSFORMER], 3 * latents + prompts)
    text = StageMemory("text", weight_bytes[Component.T5] + weight_bytes[Component.CLIP], prompts)
    given = lengths.pixel_frames(mode, causal=True, temporal_compression=settings.vae.time_compression_ratio)
    encode = (StageMemory("encode", vae, 3 * given * prod(size) * item + latents),) if given else ()
    return (text, *encode, denoise, decode)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
