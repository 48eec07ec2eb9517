"""Expected rates of links, and the verdict on a measurement.

Rates are those of one direction in GB/s (10^9 bytes), comparable with bus bandwidth.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from opensora_cli.core.device_facts import LinkKind
from opensora_cli.core.documents import Document
from opensora_cli.settings.tools import Collective

JUDGED_FROM_BYTES = 16 * 2**20
"""Below this size latency counts more than the link."""

# NVIDIA, NVLink and NVLink Switch (nvidia.com/data-center/nvlink): totals of both directions over the number of links.
_NVLINK = {
    (6, 0): ("NVLink 1", 20.0),
    (7, 0): ("NVLink 2", 25.0),
    (7, 5): ("NVLink 2", 25.0),
    (8, 0): ("NVLink 3", 25.0),
    (8, 6): ("NVLink 3", 14.0625),
    (9, 0): ("NVLink 4", 25.0),
    (10, 0): ("NVLink 5", 50.0),
    (10, 3): ("NVLink 5", 50.0),
}
"""Generation and GB/s of one link by compute capability."""

# PCI-SIG, PCI Express Base Specification: GT/s of a lane and the share of them that is data.
_PCIE = {
    1: (2.5, 8 / 10),
    2: (5, 8 / 10),
    3: (8, 128 / 130),
    4: (16, 128 / 130),
    5: (32, 128 / 130),
    6: (64, 242 / 256),
}

_GOOD = {LinkKind.NVLINK: 0.7, LinkKind.PEER: 0.6, LinkKind.HOST: 0.3}
_GOOD_NETWORK = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """Ports of a GPU."""

    capability: tuple[int, int]
    nvlinks: int = 0
    """Active NVLinks."""
    pcie_generation: int | None = None
    pcie_lanes: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkPort:
    """A network port of a host."""

    name: str
    gigabits_per_s: float
    is_infiniband: bool
    """InfiniBand or RoCE, which NCCL uses alike."""


class Expectation(Document):
    """Best rate of a kind of link, and the share of it that counts as good."""

    link: str
    gb_per_s: float
    stream_gb_per_s: float
    """Rate of one rank's stream: that of one port, where there are several."""
    good_share: float
    """Threshold of this project: a rate below it deserves a look."""
    source: str

    def line(self) -> str:
        return f"{self.link}: {self.gb_per_s:.1f} GB/s each way, good from {self.good_share:.0%} ({self.source})"


class Judgement(StrEnum):
    """Verdict on a collective."""

    GOOD = "good"
    POOR = "poor"
    WRONG = "wrong data"
    FUNCTION = "works"
    """Right data on gloo, which shows nothing of speed."""
    TOO_SMALL = "too small to judge"
    UNKNOWN = "link unknown"


class Verdict(Document):
    """Verdict on a collective, with its reason."""

    collective: Collective
    judgement: Judgement
    bus_bandwidth_gb_per_s: float
    """Best rate of its rows."""
    expected_gb_per_s: float | None = None
    source: str | None = None
    """Source of the expectation."""
    reason: str

    def line(self) -> str:
        source = f"; expected by {self.source}" if self.source else ""
        return f"{self.collective:<16}{self.judgement:<20}{self.reason}{source}"


def expectation_inside(kinds: Iterable[LinkKind], ports: Sequence[PortFacts]) -> Expectation | None:
    """Return the expected rate of the links between the GPUs of a host, or None where it is unknown.

    The slowest of all pairs and ports counts, since a ring over all GPUs passes it.
    """
    found = set(kinds)
    slowest = next((kind for kind in reversed(LinkKind) if kind in found), None)
    if slowest is None or not ports:
        return None
    rated = [_nvlink(port) if slowest is LinkKind.NVLINK else _pcie(port) for port in ports]
    known = [rate for rate in rated if rate is not None]
    if len(known) < len(rated):
        return None
    name, gb_per_s = min(known, key=lambda rate: rate[1])
    if slowest is LinkKind.NVLINK:
        source = "NVIDIA, NVLink and NVLink Switch; links counted by NVML"
    else:
        name = f"{name}, {'GPU to GPU' if slowest is LinkKind.PEER else 'through host memory'}"
        source = "PCI-SIG, PCI Express Base Specification; width reported by NVML"
    return Expectation(link=name, gb_per_s=gb_per_s, stream_gb_per_s=gb_per_s, good_share=_GOOD[slowest], source=source)


def _nvlink(port: PortFacts) -> tuple[str, float] | None:
    if port.capability not in _NVLINK or not port.nvlinks:
        return None
    generation, rate = _NVLINK[port.capability]
    return f"{generation} x{port.nvlinks}", rate * port.nvlinks


def _pcie(port: PortFacts) -> tuple[str, float] | None:
    if port.pcie_generation not in _PCIE or not port.pcie_lanes:
        return None
    transfers, share = _PCIE[port.pcie_generation]
    return f"PCIe {port.pcie_generation} x{port.pcie_lanes}", transfers * share / 8 * port.pcie_lanes


def expectation_between(ports: Sequence[NetworkPort]) -> Expectation | None:
    """Return the expected rate of all network ports of a host together, or None where none is known.

    NCCL takes InfiniBand where there is any, all ports of it at once, and else one interface.
    """
    fabric = [port for port in ports if port.is_infiniband]
    used = fabric or sorted(ports, key=lambda port: port.gigabits_per_s)[-1:]
    if not used:
        return None
    names = ", ".join(port.name for port in used)
    if fabric:
        link, source = f"InfiniBand {names}", "rate of /sys/class/infiniband/*/ports/*"
    else:
        link, source = f"network {names}", "speed that the interface reports"
    return Expectation(
        link=link,
        gb_per_s=sum(port.gigabits_per_s for port in used) / 8,
        stream_gb_per_s=max(port.gigabits_per_s for port in used) / 8,
        good_share=_GOOD_NETWORK,
        source=source,
    )


def expected_bandwidth(
    collective: Collective,
    *,
    inside: Expectation | None,
    between: Expectation | None,
    ranks: int,
    hosts: int,
) -> tuple[float, Expectation] | None:
    """Return the bus bandwidth that a collective should reach at best, and the link that bounds it.

    Over several hosts, each with as many of the `ranks`, the network bounds it. Rings enter and leave each host once,
    so they see what all its ports give. Where every rank sends to every other, most of it leaves the host: m ranks of a
    host send (n-m)/n of their data out.
    """
    if hosts == 1:
        return None if inside is None else (inside.gb_per_s, inside)
    if between is None:
        return None
    rate, local = between.gb_per_s, ranks // hosts
    if collective is Collective.SEND_RECV:
        rate = between.stream_gb_per_s
    if collective is Collective.ALL_TO_ALL:
        rate = rate / local * (ranks - 1) / (ranks - local)
    if inside is not None and inside.gb_per_s < rate:
        return inside.gb_per_s, inside
    return rate, between


def judge(
    collective: Collective,
    *,
    best_gb_per_s: float,
    largest_bytes: int,
    wrong: int,
    is_gloo: bool,
    expected: tuple[float, Expectation] | None,
) -> Verdict:
    """Return the verdict on a collective, from best bus bandwidth, largest size and wrong elements of its rows."""

    def verdict(judgement: Judgement, reason: str) -> Verdict:
        return Verdict(
            collective=collective,
            judgement=judgement,
            bus_bandwidth_gb_per_s=best_gb_per_s,
            expected_gb_per_s=None if expected is None or is_gloo else expected[0],
            source=None if expected is None or is_gloo else expected[1].source,
            reason=reason,
        )

    if wrong:
        return verdict(Judgement.WRONG, f"{wrong} element{'s are' if wrong > 1 else ' is'} not what was sent")
    if is_gloo:
        return verdict(Judgement.FUNCTION, "every element is right; gloo shows function, not speed")
    if expected is None:
        return verdict(Judgement.UNKNOWN, f"{best_gb_per_s:.1f} GB/s; what the links should give could not be read")
    rate, link = expected
    share = best_gb_per_s / rate
    reason = f"{best_gb_per_s:.1f} of {rate:.1f} GB/s, {share:.0%} ({link.link}, good from {link.good_share:.0%})"
    if share >= link.good_share:
        return verdict(Judgement.GOOD, reason)
    small = largest_bytes < JUDGED_FROM_BYTES
    return verdict(Judgement.TOO_SMALL if small else Judgement.POOR, reason)
