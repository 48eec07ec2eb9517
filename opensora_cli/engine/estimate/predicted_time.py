"""Prediction of seconds from operations, bytes and links: a roofline for each part (Williams et al. 2009).

Products and attention run at a share of the peak of their dtype, everything else at the speed of the memory, one after
the other. `docs/explanations/predictions.md` has the assumptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch

from opensora_cli.core.documents import Document
from opensora_cli.core.formatting import duration
from opensora_cli.engine.components.parallelize import exchanged_bytes
from opensora_cli.engine.estimate.fake_tensors import Work
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import ExchangePlan, MeshShape
from opensora_cli.settings.hardware import GpuSettings, Rate

PRODUCTS, ATTENTION, TRAFFIC = "matrix products", "attention", "memory traffic"
LAUNCHES, COLLECTIVES, COPIES = "starting kernels", "collectives", "host copies"
EIGHT_BITS = "matrix products in 8 bits"
TEXT, ENCODING, DECODING, UPDATE = "text", "encoding", "decoding", "optimizer"

_PAGEABLE = 0.5
"""Assumed share of a link's speed for copies from memory that is not page-locked."""


class Seconds(dict[str, float]):
    """Seconds of each part of a computation."""

    def __add__(self, other: Mapping[str, float]) -> "Seconds":
        return Seconds({part: self.get(part, 0.0) + other.get(part, 0.0) for part in (*self, *other)})

    def __mul__(self, count: float) -> "Seconds":
        return Seconds({part: count * each for part, each in self.items()})

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(self.values())


class PredictedTime(Document):
    """Predicted seconds of a run, which were not measured."""

    predicted: Literal[True] = True
    hardware: str
    """Number and name of the GPUs, such as `8xH100`."""
    of: str
    """Work that takes this time."""
    seconds: float
    stages_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    """Seconds of each part, the largest first; time that overlaps with another part is not counted."""
    left_out: str
    """Work that the prediction excludes."""

    @classmethod
    def of_stages(
        cls, stages: Mapping[str, Seconds], gpu: GpuSettings, *, devices: int, of: str, left_out: str
    ) -> Self:
        """Return the document of stages that run one after the other."""
        parts = sum(stages.values(), Seconds())
        return cls(
            hardware=f"{devices}x{gpu.name}",
            of=of,
            seconds=parts.total,
            stages_s={name: seconds.total for name, seconds in stages.items()},
            parts_s=dict(sorted(parts.items(), key=lambda item: -item[1])),
            left_out=left_out,
        )

    def lines(self) -> list[str]:
        """Return the prediction for people."""
        return [
            f"predicted {_shown(self.seconds)} {self.of} on {self.hardware}, not measured: {_joined(self.stages_s)}",
            f"parts     {_joined(self.parts_s)}",
            f"left out  {self.left_out}",
        ]


def _joined(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_shown(each)}" for name, each in seconds.items() if each >= 0.0005)


def _shown(seconds: float) -> str:
    return duration(seconds) if seconds >= 100 else f"{seconds:.3g} s"


def kernel_seconds(
    work: Work, gpu: GpuSettings, dtype: torch.dtype, *, eight_bit_tflops: float | None = None
) -> Seconds:
    """Return the seconds that a GPU takes for `work` in `dtype`.

    `eight_bit_tflops` is the peak for `work.eight_bit_flops`, and is required if there are any.
    """
    peak = _peak_flops(gpu, dtype)
    products = work.product_flops / (peak * gpu.product_efficiency)
    found = Seconds(
        {
            PRODUCTS: max(products, gpu.memory_rate.seconds(work.product_bytes)),
            ATTENTION: work.attention_flops / (peak * gpu.attention_efficiency),
            TRAFFIC: gpu.memory_rate.seconds(work.traffic_bytes),
        }
    )
    if work.eight_bit_flops:
        assert eight_bit_tflops is not None
        products = work.eight_bit_flops / (eight_bit_tflops * 1e12 * gpu.product_efficiency)
        found[EIGHT_BITS] = max(products, gpu.memory_rate.seconds(work.eight_bit_bytes))
    waited = work.kernels * gpu.launch_us * 1e-6 - found.total
    if waited > 0:
        found[LAUNCHES] = waited
    return found


def autoencoder_seconds(work: Work, gpu: GpuSettings, dtype: torch.dtype) -> float:
    """Return the seconds that a GPU takes to encode or decode: convolutions and everything else."""
    return work.product_flops / (_peak_flops(gpu, dtype) * gpu.autoencoder_efficiency)


def _peak_flops(gpu: GpuSettings, dtype: torch.dtype) -> float:
    peaks = {torch.bfloat16: gpu.bf16_tflops, torch.float16: gpu.fp16_tflops}
    return peaks.get(dtype, gpu.fp32_tflops) * 1e12


def copied(gpu: GpuSettings, num_bytes: float, *, pinned: bool, behind: float = 0.0) -> Seconds:
    """Return the seconds to copy bytes from the host's memory; page-locked copies overlap with `behind` seconds."""
    seconds = gpu.host_link.seconds(num_bytes)
    return Seconds({COPIES: max(0.0, seconds - behind) if pinned else seconds / _PAGEABLE})


@dataclass(frozen=True, slots=True)
class Links:
    """Links between GPUs, with `per_node` GPUs in a machine. Ranks that exchange the most are adjacent."""

    gpu: GpuSettings
    per_node: int

    def between(self, span: int) -> Rate:
        """Return the rate at which each of `span` adjacent ranks sends to another one, over the slowest link."""
        return self.gpu.gpu_link if span <= self.per_node else self.gpu.node_link

    def ring_seconds(self, num_bytes: float, span: int) -> float:
        """Return the seconds of gathering, scattering or summing in which each rank sends `num_bytes`.

        Between machines, rings through all GPUs of a machine use all of their links.
        """
        inside = self.gpu.gpu_link.seconds(num_bytes)
        return inside if span <= self.per_node else max(inside, self.gpu.node_link.seconds(num_bytes) / self.per_node)


def exchange_seconds(
    config: MMDiTConfig,
    mesh: MeshShape,
    exchange: ExchangePlan,
    links: Links,
    *,
    video_tokens: int,
    text_tokens: int,
    itemsize: int,
    attention: float,
    keys_and_values: float = 1.0,
) -> float:
    """Return the seconds that a rank waits for ranks that share the tokens, features or branches of clips, in one pass
    through the transformer.

    Ring attention exchanges during the `attention` seconds. `keys_and_values` is how many times keys and values go
    around the ring; a backward pass adds their gradients. Tokens are those of all clips.
    """
    sharing, waited = mesh.ring * mesh.ulysses, 0.0
    hidden = (video_tokens + text_tokens) / sharing * config.hidden_size * itemsize
    velocity = video_tokens * config.in_channels * itemsize
    if mesh.ulysses > 1:
        sizes = {"video_tokens": video_tokens, "text_tokens": text_tokens, "itemsize": itemsize}
        for stage, num_bytes in exchanged_bytes(exchange, mesh, config, **sizes).items():
            rate = links.gpu.gpu_link if stage == "inside" else links.between(mesh.ulysses * mesh.tensor)
            waited += rate.seconds(num_bytes / (sharing * mesh.tensor))
    if mesh.ring > 1:
        attentions = config.depth + config.depth_single_blocks
        sent = keys_and_values * 2 * (mesh.ring - 1) * hidden / mesh.tensor * attentions
        waited += max(0.0, links.between(sharing * mesh.tensor).seconds(sent) - attention)
    if mesh.tensor > 1:
        # A double-stream block sums after attention and after the MLP, a single-stream block once.
        sums = 2 * config.depth + config.depth_single_blocks
        waited += links.ring_seconds(2 * (mesh.tensor - 1) / mesh.tensor * sums * hidden, mesh.tensor)
    if sharing > 1:
        # Rank by rank, the velocity is gathered along tokens.
        waited += links.ring_seconds(velocity * (sharing - 1) / sharing, sharing * mesh.tensor)
    if mesh.guidance > 1:
        # The velocity is sent to ranks with other branches of guidance.
        waited += links.between(mesh.size).seconds(velocity)
    return waited
