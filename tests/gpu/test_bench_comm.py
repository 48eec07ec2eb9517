"""`osora bench-comm` over NCCL: one GPU shows that everything runs, two that links are measured."""

import json

import pytest
import torch
import torch.distributed as dist

from opensora_cli.cli.app import main
from opensora_cli.engine.bench_comm.operations import Place, make_operation, measure
from opensora_cli.engine.bench_comm.topology import gather_header
from opensora_cli.settings.tools import Collective

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture
def alone(tmp_path):
    """A group of one rank on the first GPU."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, device_id=device)
    assert dist.group.WORLD is not None
    yield Place(dist.group.WORLD, device)
    dist.destroy_process_group()


def test_one_rank_measures(alone):
    for collective in Collective:
        if collective is Collective.SEND_RECV:  # NCCL sends nothing to itself
            continue
        operation = make_operation(collective, alone, 4096, torch.float32)
        seconds = measure(operation.run, warmup=2, iters=5, device=alone.device, group=alone.group)
        assert (len(seconds), operation.count_wrong()) == (5, 0)
        assert min(seconds) >= 0


def test_the_header_names_the_card(alone):
    header = gather_header(alone.group, alone.device)
    assert header.backend == "nccl"
    assert "NCCL" in header.versions
    assert header.hosts[0].devices == (f"cuda:0 {torch.cuda.get_device_name(0)}",)


@several
def test_all_cards(capfd):
    assert main(["bench-comm", "--json", "--quiet", "--max-bytes", "64MiB", "--scaling", "strong"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["shows"] == "speed"
    assert document["wrong"] == 0
    assert document["header"]["ranks"] == torch.cuda.device_count()
    assert {verdict["judgement"] for verdict in document["verdicts"]} <= {"good", "too small to judge", "link unknown"}
    assert all(row["efficiency"] > 0 for row in document["scaling"]["rows"])
