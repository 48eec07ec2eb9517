"""Hosts, ports and networks."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from opensora_cli.core.device_facts import LinkFacts, LinkKind
from opensora_cli.engine.bench_comm.links import NetworkPort
from opensora_cli.engine.bench_comm.topology import HostLinks, join_hosts, read_network


def _port(folder: Path, name: str, *, rate: str, state: str = "4: ACTIVE") -> None:
    place = folder / name / "ports" / "1"
    place.mkdir(parents=True)
    (place / "rate").write_text(f"{rate}\n")
    (place / "state").write_text(f"{state}\n")


def test_networks_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _port(tmp_path, "mlx5_0", rate="400 Gb/sec (4X NDR)")
    _port(tmp_path, "mlx5_1", rate="200 Gb/sec (4X HDR)")
    _port(tmp_path, "mlx5_2", rate="2.5 Gb/sec (1X SDR)", state="1: DOWN")
    interfaces = {
        "lo": SimpleNamespace(isup=True, speed=0),
        "eth0": SimpleNamespace(isup=True, speed=25_000),
        "eth1": SimpleNamespace(isup=False, speed=10_000),
        "veth": SimpleNamespace(isup=True, speed=0),
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: interfaces)
    assert read_network(tmp_path) == (
        NetworkPort("mlx5_0/1", 400, is_infiniband=True),
        NetworkPort("mlx5_1/1", 200, is_infiniband=True),
        NetworkPort("eth0", 25, is_infiniband=False),
    )
    assert [port.name for port in read_network(tmp_path / "none")] == ["eth0"]


def test_ranks_of_a_host_come_together() -> None:
    links = tuple(LinkFacts(*pair, LinkKind.NVLINK) for pair in ((0, 1), (0, 2), (1, 2)))
    reports = [
        HostLinks(name=name, ranks=(rank,), devices=(f"cuda:{card} H100",), cards=(card,), links=links)
        for rank, (name, card) in enumerate([("node0", 0), ("node0", 2), ("node1", 1)])
    ]
    first, second = join_hosts(reports)
    assert (first.name, first.ranks, first.cards) == ("node0", (0, 1), (0, 2))
    # Only cards that take part.
    assert first.links == (links[1],)
    assert (second.ranks, second.links) == ((2,), ())
