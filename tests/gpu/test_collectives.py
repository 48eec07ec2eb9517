"""Collectives over NCCL against the same over gloo, in processes of their own."""

import socket
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_as_ranks
from torch import Tensor

from opensora_cli.core.ranks import RankContext
from opensora_cli.parallel.collectives import all_gather, all_reduce_sum, all_to_all, exchange_directly, reduce_scatter
from opensora_cli.parallel.exchanges import compressed
from opensora_cli.parallel.rendezvous import init_with_retry
from opensora_cli.parallel.shares import shares


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_nccl_does_what_gloo_does() -> None:
    _run("_compare", ranks=min(4, torch.cuda.device_count()))


def _run(scenario: str, *, ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_as_ranks(__file__, scenario, port, ranks, ranks=ranks)


def _compare(ranks: int, rank: int) -> None:
    group, sizes, columns = dist.group.WORLD, shares(2 * ranks + 1, ranks), shares(3 * ranks - 1, ranks)

    def results(device: str) -> list[Tensor]:
        """Return results and gradients: with integers in fp32 no order of sums matters."""
        generator = torch.Generator().manual_seed(rank)
        share = torch.randint(-9, 9, (2, sizes[rank], sum(columns), 8), generator=generator).float().to(device)
        share.requires_grad_()
        rounded = partial(compressed, partial(exchange_directly, group), "fp8")
        whole = all_gather(share, group, dim=1, sizes=sizes)
        outs = [
            whole,
            all_reduce_sum(whole, group),
            reduce_scatter(whole, group, dim=1, sizes=sizes),
            all_to_all(share, group, scatter_sizes=columns, gather_sizes=sizes),
            all_to_all(share, group, scatter_sizes=columns, gather_sizes=sizes, exchange=rounded),
        ]
        sum((out * out.detach()).sum() for out in outs[:4]).backward()
        return [tensor.detach().cpu() for tensor in (*outs, share.grad)]

    for over_nccl, over_gloo in zip(results("cuda"), results("cpu"), strict=True):
        assert over_nccl.any()
        assert torch.equal(over_nccl, over_gloo)


if __name__ == "__main__":
    _, _scenario, _port, _ranks, _rank = sys.argv
    torch.cuda.set_device(int(_rank))
    rank = {"rank": int(_rank), "local_rank": int(_rank), "world_size": int(_ranks), "nnodes": 1}
    init_with_retry("cuda", RankContext(**rank, master_addr="127.0.0.1", master_port=int(_port)))
    globals()[_scenario](int(_ranks), int(_rank))
    dist.destroy_process_group()
    print("done")
