"""What links should give, and verdicts."""

import pytest

from opensora_cli.core.device_facts import LinkKind
from opensora_cli.engine.bench_comm.links import (
    Expectation,
    Judgement,
    NetworkPort,
    PortFacts,
    Verdict,
    expectation_between,
    expectation_inside,
    expected_bandwidth,
    judge,
)
from opensora_cli.settings.tools import Collective

H100 = PortFacts(capability=(9, 0), nvlinks=18, pcie_generation=5, pcie_lanes=16)
A100 = PortFacts(capability=(8, 0), nvlinks=12, pcie_generation=4, pcie_lanes=16)
NDR = [NetworkPort(f"mlx5_{index}/1", 400, is_infiniband=True) for index in range(8)]
ETHERNET = [NetworkPort("eth0", 100, is_infiniband=False), NetworkPort("eth1", 10, is_infiniband=False)]


@pytest.mark.parametrize(
    ("kinds", "port", "link", "rate"),
    [
        ([LinkKind.NVLINK], H100, "NVLink 4 x18", 450),
        ([LinkKind.NVLINK], A100, "NVLink 3 x12", 300),
        ([LinkKind.NVLINK], PortFacts(capability=(8, 6), nvlinks=4), "NVLink 3 x4", 56.25),
        ([LinkKind.NVLINK], PortFacts(capability=(10, 0), nvlinks=18), "NVLink 5 x18", 900),
        ([LinkKind.NVLINK, LinkKind.PEER], A100, "PCIe 4 x16, GPU to GPU", 31.5),
        ([LinkKind.HOST, LinkKind.NVLINK], A100, "PCIe 4 x16, through host memory", 31.5),
        ([LinkKind.PEER], PortFacts(capability=(7, 5), pcie_generation=3, pcie_lanes=8), "PCIe 3 x8, GPU", 7.88),
    ],
)
def test_links_between_gpus(kinds: list[LinkKind], port: PortFacts, link: str, rate: float) -> None:
    expected = expectation_inside(kinds, [port, port])
    assert expected is not None
    assert expected.link.startswith(link)
    assert expected.gb_per_s == pytest.approx(rate, rel=1e-3)
    assert 0 < expected.good_share < 1
    assert expected.source.startswith(("NVIDIA", "PCI-SIG"))


def test_the_slowest_gpu_counts() -> None:
    half = PortFacts(capability=(9, 0), nvlinks=9)
    expected = expectation_inside([LinkKind.NVLINK], [H100, half, H100])
    assert expected is not None
    assert expected.gb_per_s == 225


@pytest.mark.parametrize("ports", [[], [H100, PortFacts(capability=(9, 0))], [PortFacts(capability=(12, 0))]])
def test_what_cannot_be_read_is_not_guessed(ports: list[PortFacts]) -> None:
    assert expectation_inside([LinkKind.NVLINK], ports) is None
    assert expectation_inside([], [H100]) is None
    assert expectation_between([]) is None


def test_networks() -> None:
    fabric = expectation_between([*ETHERNET, *NDR])
    assert fabric is not None
    assert (fabric.gb_per_s, fabric.stream_gb_per_s) == (400, 50)
    assert fabric.link.startswith("InfiniBand mlx5_0/1, mlx5_1/1")
    plain = expectation_between(ETHERNET)
    assert plain is not None
    assert (plain.gb_per_s, plain.link) == (12.5, "network eth0")


def _expected(collective: Collective, *, ranks: int, hosts: int, nics: int = 8) -> float:
    found = expected_bandwidth(
        collective,
        inside=expectation_inside([LinkKind.NVLINK], [H100]),
        between=expectation_between(NDR[:nics]),
        ranks=ranks,
        hosts=hosts,
    )
    assert found is not None
    return found[0]


def test_which_link_bounds_a_collective() -> None:
    assert _expected(Collective.ALL_REDUCE, ranks=8, hosts=1) == 450
    assert _expected(Collective.ALL_REDUCE, ranks=16, hosts=2) == 400
    assert _expected(Collective.SEND_RECV, ranks=16, hosts=2) == 50
    # Of 16 ranks on 2 hosts, each sends 8 of 16 parts out, through an eighth of the host's 400 GB/s.
    seconds_per_byte = 8 / 16 / (400 / 8)
    assert _expected(Collective.ALL_TO_ALL, ranks=16, hosts=2) == pytest.approx(15 / 16 / seconds_per_byte)
    # One rank a host: every link is the network.
    assert _expected(Collective.ALL_TO_ALL, ranks=4, hosts=4, nics=1) == 50
    assert expected_bandwidth(Collective.ALL_REDUCE, inside=None, between=None, ranks=4, hosts=2) is None


def _judged(best: float, **changes: object) -> Verdict:
    link = Expectation(link="NVLink 4 x18", gb_per_s=450, stream_gb_per_s=450, good_share=0.7, source="NVIDIA")
    facts = {"largest_bytes": 2**30, "wrong": 0, "is_gloo": False, "expected": (450.0, link)} | changes
    return judge(Collective.ALL_REDUCE, best_gb_per_s=best, **facts)  # type: ignore[arg-type]


def test_verdicts() -> None:
    good = _judged(360)
    assert (good.judgement, good.expected_gb_per_s) == (Judgement.GOOD, 450)
    assert good.reason == "360.0 of 450.0 GB/s, 80% (NVLink 4 x18, good from 70%)"
    assert _judged(200).judgement is Judgement.POOR
    assert _judged(2, largest_bytes=2**16).judgement is Judgement.TOO_SMALL
    assert _judged(360, largest_bytes=2**16).judgement is Judgement.GOOD
    assert _judged(360, expected=None).judgement is Judgement.UNKNOWN
    assert _judged(360, wrong=3).judgement is Judgement.WRONG
    assert _judged(0.1, wrong=3, is_gloo=True).judgement is Judgement.WRONG
    gloo = _judged(449, is_gloo=True)
    assert (gloo.judgement, gloo.expected_gb_per_s, "GB/s" in gloo.line()) == (Judgement.FUNCTION, None, False)
