"""Recommended settings for three kinds of machines, each with its reason.

What torch, NCCL and torchrun do by themselves is not among them.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from opensora_cli.settings.enums import EnvProfile

PROFILE_SCHEMA = "osora.env-profile/1"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """An environment variable, and why it should be so."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is recommended for a kind of machine."""

    name: EnvProfile
    title: str
    variables: tuple[Recommendation, ...]
    notes: tuple[str, ...]
    """What cannot be a variable."""

    def export_lines(self) -> list[str]:
        """Return shell lines for `eval`.

        Each ends in a semicolon and has no comment, so that `eval $(...)` works without quotes too.
        """
        return [f"export {item.name}={shlex.quote(item.value)};" for item in self.variables]

    def to_json(self, environment: Mapping[str, str]) -> dict[str, object]:
        """Return it as a document of the schema `osora.env-profile/1`."""
        return {
            "schema": PROFILE_SCHEMA,
            "profile": self.name.value,
            "title": self.title,
            "variables": [
                {**asdict(item), "is_set": environment.get(item.name) == item.value} for item in self.variables
            ],
            "notes": list(self.notes),
        }

    def lines(self, environment: Mapping[str, str]) -> list[str]:
        """Return it for people; what is set already is marked."""
        lines = [self.title]
        for item in self.variables:
            is_set = environment.get(item.name) == item.value
            lines += [f"  {item.name}={item.value}{' (is set)' if is_set else ''}", f"      {item.why}"]
        return [*lines, *(f"  {note}" for note in self.notes)]


# Text encoders, transformer and autoencoder take turns on the card. With segments of fixed size, what one leaves free
# is in pieces that the next cannot use.
_EXPANDABLE = Recommendation(
    "PYTORCH_ALLOC_CONF",
    "expandable_segments:True",
    "memory that one stage frees is of use to the next, whatever its size",
)
# huggingface_hub: HF_XET_HIGH_PERFORMANCE. Not for desktops, where a download should leave room for other things.
_FAST_DOWNLOAD = Recommendation(
    "HF_XET_HIGH_PERFORMANCE", "1", "a rented machine downloads 34 GB of weights first, and may use all cores for it"
)
# Without it, NCCL fails with no more than "unhandled system error".
_NCCL_WARNINGS = Recommendation(
    "NCCL_DEBUG", "WARN", "NCCL says what failed, and on which card; it is silent otherwise"
)
# CUDA counts the fastest card first, nvidia-smi by the bus: with two different cards, cuda:0 is another one in each.
_BUS_ORDER = Recommendation("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "cuda:0 is then the card that nvidia-smi calls 0")

PROFILES: Mapping[EnvProfile, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name=EnvProfile.LOCAL,
            title="local: a desktop with a card of 24 GB",
            variables=(_EXPANDABLE, _BUS_ORDER),
            notes=("close what draws on the card: browsers and games hold up to 2 GB of it",),
        ),
        Profile(
            name=EnvProfile.CLOUD,
            title="cloud: a rented machine with cards of 80 GB",
            variables=(_EXPANDABLE, _NCCL_WARNINGS, _FAST_DOWNLOAD),
            notes=("start containers with --shm-size=8g: NCCL and loading workers exchange through /dev/shm",),
        ),
        Profile(
            name=EnvProfile.CLUSTER,
            title="cluster: several nodes",
            variables=(_EXPANDABLE, _NCCL_WARNINGS),
            notes=(
                "ulimit -l unlimited on every node: InfiniBand registers its buffers as locked memory",
                "NCCL_SOCKET_IFNAME only where nodes have several networks: the name of the one that joins them",
            ),
        ),
    )
}
