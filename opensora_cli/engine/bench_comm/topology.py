"""Facts gathered from all ranks: hosts, devices, links, networks, versions."""

import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it ships none
import torch
import torch.distributed as dist

from opensora_cli.core.device import capability, collective_backends, current_gpu, device_name, is_gpu
from opensora_cli.core.device_facts import LinkFacts, LinkKind, nvml_gpus, read_gpus, read_links, read_torch
from opensora_cli.core.device_names import GPU, indexed
from opensora_cli.core.documents import Document
from opensora_cli.core.rank_messages import all_gather_json
from opensora_cli.engine.bench_comm.links import (
    Expectation,
    NetworkPort,
    PortFacts,
    expectation_between,
    expectation_inside,
)
from opensora_cli.engine.components.hardware import versions

_INFINIBAND = Path("/sys/class/infiniband")


class HostLinks(Document):
    """One host: the devices of its ranks, and their links."""

    name: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    """Devices of the ranks."""
    cards: tuple[int, ...] = ()
    """Numbers of their GPUs. Empty on CPUs."""
    links: tuple[LinkFacts, ...] = ()
    ports: tuple[PortFacts, ...] = ()
    network: tuple[NetworkPort, ...] = ()


class Header(Document):
    """Machines, software and links of a measurement."""

    backend: str
    versions: Mapping[str, str]
    ranks: int
    hosts: tuple[HostLinks, ...]
    inside: Expectation | None
    """Expected rate of the links between the GPUs of a host."""
    between: Expectation | None
    """Expected rate of the network between hosts."""

    @property
    def is_gloo(self) -> bool:
        """Whether the backend is gloo, whose rates say nothing of GPUs."""
        return self.backend == "gloo"

    def lines(self) -> list[str]:
        hosts = f"{len(self.hosts)} host{'s' if len(self.hosts) > 1 else ''}"
        found = [
            f"backend     {self.backend}, {self.ranks} ranks on {hosts}",
            f"versions    {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ]
        for host in self.hosts:
            found += [f"host        {line}" for line in _host_lines(host)]
        for expected in (self.inside, self.between):
            if expected is not None:
                found.append(f"expected    {expected.line()}")
        if self.is_gloo:
            found.append("note        gloo shows function, not speed: no number here holds for a GPU or its links")
        return found


def _host_lines(host: HostLinks) -> list[str]:
    found = [f"{host.name}: rank {rank} on {device}" for rank, device in zip(host.ranks, host.devices, strict=True)]
    for kind in LinkKind:
        pairs = [f"{link.first}-{link.second}" for link in host.links if link.kind is kind]
        if pairs:
            found.append(f"{host.name}: {kind} between GPUs {', '.join(pairs)}")
    if host.network:
        rates = ", ".join(f"{port.name} {port.gigabits_per_s:g} Gb/s" for port in host.network)
        found.append(f"{host.name}: network {rates}")
    return found


def gather_header(group: dist.ProcessGroup, device: torch.device) -> Header:
    """Return the header. All ranks call this."""
    reports = all_gather_json(_this_rank(group, device).to_json(), group)
    hosts = join_hosts([HostLinks.model_validate(report) for report in reports])
    kinds = [link.kind for host in hosts for link in host.links]
    ports = [port for host in hosts for port in host.ports]
    slowest = min(
        (expectation_between(host.network) for host in hosts),
        key=lambda expected: expected.gb_per_s if expected else 0.0,
    )
    return Header(
        backend=collective_backends(device.type).rpartition(":")[2],
        versions=versions() | read_torch().library_versions(),
        ranks=group.size(),
        hosts=hosts,
        inside=expectation_inside(kinds, ports) if is_gpu(device) else None,
        between=slowest if is_gpu(device) and len(hosts) > 1 else None,
    )


def join_hosts(reports: Sequence[HostLinks]) -> tuple[HostLinks, ...]:
    """Return one entry for each host out of one for each rank; only GPUs that have a rank count."""
    by_name: dict[str, list[HostLinks]] = {}
    for report in reports:
        by_name.setdefault(report.name, []).append(report)
    hosts = []
    for name, of_host in by_name.items():
        cards = tuple(index for report in of_host for index in report.cards)
        hosts.append(
            HostLinks(
                name=name,
                ranks=tuple(rank for report in of_host for rank in report.ranks),
                devices=tuple(device for report in of_host for device in report.devices),
                cards=cards,
                links=tuple(link for link in of_host[0].links if {link.first, link.second} <= {*cards}),
                ports=tuple(port for report in of_host for port in report.ports),
                network=of_host[0].network,
            )
        )
    return tuple(hosts)


def _this_rank(group: dist.ProcessGroup, device: torch.device) -> HostLinks:
    name, rank, network = socket.gethostname(), (dist.get_rank(group),), read_network()
    if not is_gpu(device):
        processor = platform.processor() or platform.machine()
        return HostLinks(name=name, ranks=rank, devices=(f"cpu {processor}",), network=network)
    index = current_gpu().index if device.index is None else device.index
    return HostLinks(
        name=name,
        ranks=rank,
        devices=(f"{indexed(index)} {device_name(device)}",),
        cards=(index,),
        links=read_links(read_gpus()),
        ports=(_port(index),),
        network=network,
    )


def _port(index: int) -> PortFacts:
    """Return the ports of a GPU; without NVML its capability alone is known."""
    facts = PortFacts(capability=capability(torch.device(GPU, index)))
    with nvml_gpus(index) as found:
        if found is None:
            return facts
        nvml, (handle,) = found
        try:
            return replace(
                facts,
                nvlinks=sum(_is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)),
                # The most that GPU and slot can do: an idle GPU slows its link down.
                pcie_generation=nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                pcie_lanes=nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            )
        except nvml.NVMLError:  # as for a slice of a GPU
            return facts


def _is_active(nvml: Any, handle: object, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError:  # the GPU has fewer
        return False


def read_network(infiniband: Path = _INFINIBAND) -> tuple[NetworkPort, ...]:
    """Return the active network ports of this host: InfiniBand, RoCE, and interfaces that report their speed."""
    found = []
    for rate in sorted(infiniband.glob("*/ports/*/rate")):
        # "400 Gb/sec (4X NDR)" and "4: ACTIVE" (Linux, Documentation/ABI/stable/sysfs-class-infiniband).
        if "ACTIVE" in _text(rate.with_name("state")):
            gigabits = float(_text(rate).split()[0])
            found.append(NetworkPort(f"{rate.parts[-4]}/{rate.parts[-2]}", gigabits, is_infiniband=True))
    for name, stats in psutil.net_if_stats().items():
        if stats.isup and stats.speed and name != "lo":
            found.append(NetworkPort(name, stats.speed / 1e3, is_infiniband=False))
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
