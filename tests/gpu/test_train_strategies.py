"""Strategies of training over NCCL against one process on a GPU, in processes of their own."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_as_ranks
from tiny_strategies import Case, Run, tiny_transformer

from opensora_cli.core.device import collective_backends
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.train.distribution import Distribution

STEPS = 10
_MICRO_BATCHES = 4
_ALIGNED = 0.6
"""Of the width: rows of a single block's products then begin at multiples of 16 bytes, which CUDA's attention needs."""
CASES = [
    Case("ddp", 2),
    Case("zero1", 2),
    Case("zero2", 2),
    Case("zero3", 2),
    Case("hybrid", 2, (("tensor_parallel_degree", 2),)),
    Case("hybrid", 2, (("ulysses_degree", 2),)),
    Case("hybrid", 2, (("ring_degree", 2),)),
]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    run_as_ranks(__file__, f"file://{tmp_path / 'meeting_place'}", ranks=2)


def test_compiled_blocks_learn_the_same() -> None:
    expected = _of_one_process(torch.device("cuda"))
    model = tiny_transformer(mlp_ratio=_ALIGNED)
    compile_blocks(model, warn=pytest.fail)
    run = Run(Distribution(torch.device("cuda")), model, _MICRO_BATCHES)
    run.step(STEPS)
    assert run.losses == pytest.approx(expected, rel=1e-3)


def _of_one_process(device: torch.device) -> list[float]:
    run = Run(Distribution(device), tiny_transformer(mlp_ratio=_ALIGNED), _MICRO_BATCHES)
    run.step(STEPS)
    return run.losses


def _compare(meeting_place: str, rank: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    expected = _of_one_process(device)
    dist.init_process_group(collective_backends("cuda"), init_method=meeting_place, rank=rank, world_size=2)
    for case in CASES:
        run = Run(case.open(device=str(device)), tiny_transformer(mlp_ratio=_ALIGNED), _MICRO_BATCHES)
        run.step(STEPS)
        assert run.losses == pytest.approx(expected, rel=1e-4), case
    dist.destroy_process_group()


if __name__ == "__main__":
    _compare(sys.argv[1], int(sys.argv[2]))
    print("done")
