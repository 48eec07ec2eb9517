"""Strategies of training over NCCL against one process on a GPU, in processes of their own."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_as_ranks
from tiny_strategies import Case, VelocityTask, numbered_trainer, tiny_transformer

from opensora_cli.core.device import collective_backends
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.models.mmdit.model import MMDiT

STEPS = 10
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
    expected = _losses(Distribution(torch.device("cuda")))
    model = tiny_transformer(mlp_ratio=_ALIGNED)
    compile_blocks(model, warn=pytest.fail)
    assert _losses(Distribution(torch.device("cuda")), model) == pytest.approx(expected, rel=1e-3)


def _losses(distribution: Distribution, model: MMDiT | None = None) -> list[float]:
    task = VelocityTask(model or tiny_transformer(mlp_ratio=_ALIGNED))
    trainer = numbered_trainer(task, distribution, micro_batches=4)
    return [trainer.do_step().figures["loss"] for _ in range(STEPS)]


def _compare(meeting_place: str, rank: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    expected = _losses(Distribution(device))
    dist.init_process_group(collective_backends("cuda"), init_method=meeting_place, rank=rank, world_size=2)
    for case in CASES:
        assert _losses(case.open(device=str(device))) == pytest.approx(expected, rel=1e-4), case
    dist.destroy_process_group()


if __name__ == "__main__":
    _compare(sys.argv[1], int(sys.argv[2]))
    print("done")
