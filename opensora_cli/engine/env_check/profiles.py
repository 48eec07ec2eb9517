"""Recommended settings for three kinds of machines, each with its reason.

What torch, NCCL and torchrun do by themselves is not among them.
"""

import shlex
from collections.abc import Mapping
from typing import ClassVar

from opensora_cli.core.documents import Document
from opensora_cli.settings.tools import EnvProfile


class Recommendation(Document):
    """Recommended value of an environment variable, with its reason."""

    name: str
    value: str
    why: str


class Profile(Document):
    """Recommended variables for a kind of machine, in the schema `osora.env-profile/2`."""

    SCHEMA: ClassVar[str | None] = "osora.env-profile/2"

    profile: EnvProfile
    title: str
    variables: tuple[Recommendation, ...]
    notes: tuple[str, ...]
    """Advice that is no variable."""

    def lines(self) -> list[str]:
        """Return the lines for people."""
        lines = [self.title]
        for item in self.variables:
            lines += [f"  {item.name}={item.value}", f"      {item.why}"]
        return [*lines, *(f"  {note}" for note in self.notes)]

    def export_lines(self) -> list[str]:
        """Return shell lines for `eval`.

        Each ends in a semicolon and has no comment, so that `eval $(...)` works without quotes too.
        """
        return [f"export {item.name}={shlex.quote(item.value)};" for item in self.variables]


_EXPANDABLE = Recommendation(
    name="PYTORCH_ALLOC_CONF",
    value="expandable_segments:True",
    why="the next stage can use the memory that one frees, in pieces of any size",
)
# Without it, NCCL fails with no more than "unhandled system error".
_NCCL_WARNINGS = Recommendation(
    name="NCCL_DEBUG", value="WARN", why="NCCL reports what failed, and on which GPU; it is silent otherwise"
)
# CUDA counts the fastest GPU first, nvidia-smi by the bus: with two different GPUs, cuda:0 is another one in each.
_BUS_ORDER = Recommendation(
    name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", why="cuda:0 is then the GPU that nvidia-smi calls 0"
)
# Not for desktops, where a download should leave room for other things.
_FAST_DOWNLOAD = Recommendation(
    name="HF_XET_HIGH_PERFORMANCE",
    value="1",
    why="a rented machine downloads 34 GB of weights first, and may use all cores for it",
)

PROFILES: Mapping[EnvProfile, Profile] = {
    EnvProfile.LOCAL: Profile(
        profile=EnvProfile.LOCAL,
        title="local: a desktop with a GPU of 24 GB",
        variables=(_EXPANDABLE, _BUS_ORDER),
        notes=("close other programs that use the GPU: browsers and games hold up to 2 GB",),
    ),
    EnvProfile.CLOUD: Profile(
        profile=EnvProfile.CLOUD,
        title="cloud: a rented machine with GPUs of 80 GB",
        variables=(_EXPANDABLE, _NCCL_WARNINGS, _FAST_DOWNLOAD),
        notes=("start containers with --shm-size=8g: NCCL and data loading workers exchange through /dev/shm",),
    ),
    EnvProfile.CLUSTER: Profile(
        profile=EnvProfile.CLUSTER,
        title="cluster: several nodes",
        variables=(_EXPANDABLE, _NCCL_WARNINGS),
        notes=(
            "ulimit -l unlimited on every node: InfiniBand registers its buffers as locked memory",
            "NCCL_SOCKET_IFNAME only where nodes have several networks: the name of the one that joins them",
        ),
    ),
}
