"""Time that ranks wait for each other: exchanged bytes, and the links between GPUs and machines."""

from collections.abc import Mapping
from dataclasses import dataclass

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.hardware import GpuSettings, Rate


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Exchange of ranks that share the tokens or features of clips, in one pass through the transformer."""

    config: MMDiTConfig
    mesh: MeshShape
    links: Links
    video_tokens: int
    """Video tokens of all clips."""
    text_tokens: int
    itemsize: int
    for_heads: Mapping[str, int]
    """Bytes that all ranks send for heads: `sent`, or `inside` and `between`, as in `PlannedExchange`."""

    def seconds(self, *, attention: float, keys_and_values: float = 1.0) -> float:
        """Return the seconds that a rank waits. Ring attention exchanges during the `attention` seconds.

        `keys_and_values` is how many times keys and values go around the ring; a backward pass adds their gradients.
        """
        mesh = self.mesh
        sharing = mesh.ring * mesh.ulysses
        hidden = (self.video_tokens + self.text_tokens) / sharing * self.config.hidden_size * self.itemsize
        waited = 0.0
        for stage, num_bytes in self.for_heads.items():
            rate = self.links.gpu.gpu_link if stage == "inside" else self.links.between(mesh.ulysses * mesh.tensor)
            waited += rate.seconds(num_bytes / (sharing * mesh.tensor))
        if mesh.ring > 1:
            attentions = self.config.depth + self.config.depth_single_blocks
            sent = keys_and_values * 2 * (mesh.ring - 1) * hidden / mesh.tensor * attentions
            passed = self.links.between(sharing * mesh.tensor).seconds(sent)
            waited += max(0.0, passed - attention)
        if mesh.tensor > 1:
            # A double-stream block sums after attention and after the MLP, a single-stream block once.
            sums = 2 * self.config.depth + self.config.depth_single_blocks
            waited += self.links.ring_seconds(2 * (mesh.tensor - 1) / mesh.tensor * sums * hidden, mesh.tensor)
        if sharing > 1:
            # Rank by rank, the velocity is gathered along tokens.
            waited += self.links.ring_seconds(self._velocity * (sharing - 1) / sharing, sharing * mesh.tensor)
        return waited

    def between_branches(self) -> float:
        """Return the seconds to send the velocity to ranks with other branches of guidance."""
        return self.links.between(self.mesh.size).seconds(self._velocity) if self.mesh.guidance > 1 else 0.0

    @property
    def _velocity(self) -> int:
        return self.video_tokens * self.config.in_channels * self.itemsize
