"""Several GPUs over NCCL, each with a process of its own, against one GPU or the same over gloo."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shared_tokens import attended
from tiny_strategies import Case, VelocityTask, numbered_trainer, tiny_transformer
from torch import Tensor

from opensora_cli.core.device import collective_backends
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.collectives import all_gather, all_reduce_sum, all_to_all, exchange_directly, reduce_scatter
from opensora_cli.parallel.sequence import compressed
from opensora_cli.parallel.shares import shares

GPUS = torch.cuda.device_count()
STEPS = 10
_ALIGNED = 0.6
"""Ratio of widths at which rows of a single block's products begin at multiples of 16 bytes, as CUDA's attention needs.
"""
CASES = [
    *(Case(strategy, 2) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    *(Case("hybrid", 2, ((f"{axis}_degree", 2),)) for axis in ("tensor_parallel", "ulysses", "ring")),
]


@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        *((("attention", ring, ulysses), ring * ulysses) for ring, ulysses in ((2, 1), (1, 2), (4, 1), (1, 4), (2, 2))),
        (("collectives",), 2),
        (("collectives",), 4),
        (("strategies",), 2),
    ],
)
def test_ranks_compute_what_one_does(tmp_path: Path, scenario: tuple[object, ...], ranks: int) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} CUDA devices")
    command = [sys.executable, __file__, f"file://{tmp_path / 'meeting_place'}", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    processes = [
        subprocess.Popen(
            [*command, str(rank), *map(str, scenario)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out
            assert out.endswith("done\n")
    finally:
        for process in processes:
            process.kill()


def attention(ring: str, ulysses: str) -> None:
    ranks = dist.get_world_size()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 0.004), (torch.bfloat16, 0.03)):
        tokens = shares(4 * ranks + 3, ranks)
        found = attended(int(ring), int(ulysses), 7, tokens, dtype, device_type="cuda")
        assert max(found.errors) < 2 * tolerance
        assert found.dtypes == {dtype}


def collectives() -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    sizes, columns = shares(2 * ranks + 1, ranks), shares(3 * ranks - 1, ranks)

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


def strategies() -> None:
    device = torch.device("cuda", dist.get_rank())
    expected = _losses(Distribution(device))
    for case in CASES:
        assert _losses(case.open(device=str(device))) == pytest.approx(expected, rel=1e-4), case


def _losses(distribution: Distribution, model: MMDiT | None = None) -> list[float]:
    task = VelocityTask(model or tiny_transformer(mlp_ratio=_ALIGNED))
    trainer = numbered_trainer(task, distribution, micro_batches=4)
    return [trainer.do_step().figures["loss"] for _ in range(STEPS)]


def test_compiled_blocks_learn_the_same() -> None:
    expected = _losses(Distribution(torch.device("cuda")))
    model = tiny_transformer(mlp_ratio=_ALIGNED)
    compile_blocks(model, warn=pytest.fail)
    assert _losses(Distribution(torch.device("cuda")), model) == pytest.approx(expected, rel=1e-3)


if __name__ == "__main__":
    _, _place, _ranks, _rank, _scenario, *_rest = sys.argv
    torch.cuda.set_device(int(_rank))
    dist.init_process_group(collective_backends("cuda"), init_method=_place, rank=int(_rank), world_size=int(_ranks))
    globals()[_scenario](*_rest)
    dist.destroy_process_group()
    print("done")
