"""How long ranks wait for each other: bytes that are exchanged, and the links between GPUs and machines."""

from collections.abc import Mapping
from dataclasses import dataclass

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.hardware import GpuSettings, Rate


@dataclass(frozen=True, slots=True)
class Links:
    """What joins GPUs, `per_node` of which are in a machine. Ranks that exchange the most are adjacent."""

    gpu: GpuSettings
    per_node: int

    def between(self, span: int) -> Rate:
        """Return the rate at which each of `span` adjacent ranks sends to another: the slowest link counts."""
        return self.gpu.gpu_link if span <= self.per_node else self.gpu.node_link

    def ring_seconds(self, num_bytes: float, span: int) -> float:
        """Return how long gathering, scattering or summing takes in which each rank sends so many bytes.

        Between machines, rings through all GPUs of a machine make use of all of their links.
        """
        inside = self.gpu.gpu_link.seconds(num_bytes)
        return inside if span <= self.per_node else max(inside, self.gpu.node_link.seconds(num_bytes) / self.per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What ranks that share the tokens or features of clips exchange in one pass through the transformer."""

    config: MMDiTConfig
    mesh: MeshShape
    links: Links
    video_tokens: int
    """Of all clips."""
    text_tokens: int
    itemsize: int
    for_heads: Mapping[str, int]
    """Bytes that all ranks send for heads: `sent`, or `inside` and `between`, as `PlannedExchange` has them."""

    def seconds(self, *, attention: float, keys_and_values: float = 1.0) -> float:
        """Return how long a rank waits. Ring attention exchanges while `attention` runs for so many seconds.

        Keys and values go round so many times: in a backward pass with their gradients.
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
            # A double-stream block sums after attention and after the MLP, a single-stream one once.
            sums = 2 * self.config.depth + self.config.depth_single_blocks
            waited += self.links.ring_seconds(2 * (mesh.tensor - 1) / mesh.tensor * sums * hidden, mesh.tensor)
        if sharing > 1:
            # Rank by rank, the velocity is gathered along tokens.
            waited += self.links.ring_seconds(self._velocity * (sharing - 1) / sharing, sharing * mesh.tensor)
        return waited

    def between_branches(self) -> float:
        """Return how long it takes to send the velocity to ranks that have other branches of guidance."""
        return self.links.between(self.mesh.size).seconds(self._velocity) if self.mesh.guidance > 1 else 0.0

    @property
    def _velocity(self) -> int:
        return self.video_tokens * self.config.in_channels * self.itemsize
