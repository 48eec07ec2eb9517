"""Names of the community that need ranks, called as the community calls them."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensora_cli.community import parallel
from opensora_cli.community.checkpoint import CheckpointIO, model_sharding, record_model_param_shape
from opensora_cli.community.parallel import (
    CommunicationScheduler,
    RobustCommunication,
    _gather,
    _split,
    all_to_all,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from opensora_cli.community.training import create_lr_scheduler, update_ema
from opensora_cli.core.exceptions import HardwareError, OutputError


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def whole() -> Tensor:
    return torch.arange(16.0).view(1, 4, 4)


def own(x: Tensor, dim: int) -> Tensor:
    return x.chunk(2, dim)[dist.get_rank()].contiguous()


def _named() -> None:
    """Call what `test_collectives.py` computes with, in the community's order of arguments."""
    rows, columns = own(whole(), 1), own(whole(), 2)
    assert torch.equal(all_to_all(rows, world()), columns)
    assert torch.equal(all_to_all(columns, world(), 1, 2), rows)
    weights, share = torch.arange(1.0, 17).view(1, 4, 4), columns.clone().requires_grad_()
    out = gather_forward_split_backward(share, world(), -1, grad_scale="up")
    assert torch.equal(out, whole())
    (out * weights).sum().backward()
    assert share.grad is not None
    assert torch.equal(share.grad, 2 * own(weights, -1))
    x = whole().requires_grad_()
    part = split_forward_gather_backward(x, world(), 1, grad_scale=1.0)
    assert torch.equal(part, rows)
    (part * (dist.get_rank() + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, 0].tolist() == [1, 1, 2, 2]
    assert not _gather(share, world()).requires_grad
    assert torch.equal(_gather(columns, world(), dim=-1), whole())
    assert torch.equal(_split(whole(), world(), 1), rows)


def _scheduled() -> None:
    scheduler = CommunicationScheduler()
    columns, rows = own(whole(), 2), own(whole(), 1)
    first = scheduler.schedule_communication("all_to_all", columns, world())
    second = scheduler.schedule_communication("gather_split", own(whole(), -1), world())
    # Any order of waiting will do.
    handles = ((first, rows), (second, whole()))[:: 1 if dist.get_rank() else -1]
    for handle, expected in handles:
        assert torch.equal(handle.wait(), expected)
    assert scheduler.pending_ops == []
    share = columns.clone().requires_grad_()
    out = scheduler.execute_communication("all_to_all", share, world())
    assert torch.equal(out, rows)
    assert out.requires_grad
    assert torch.equal(scheduler.execute_communication("gather_split", own(whole(), -1), world()), whole())


def _retried() -> tuple[list[float], int]:
    robust, rank, calls, waits = RobustCommunication(max_retries=3), dist.get_rank(), [0], []

    def failing(*args: Any) -> Tensor:
        out = all_to_all(*args)
        calls[0] += 1
        # The first time on one rank alone, the second time on the other.
        if calls[0] == rank + 1:
            raise RuntimeError("connection closed by peer")
        return out

    with patch.object(parallel, "all_to_all", failing), patch("time.sleep", waits.append):
        out = robust.safe_all_to_all(own(whole(), 1), world())
        assert torch.equal(out, own(whole(), 2))
        assert torch.equal(robust.safe_all_to_all(own(whole(), 1), world()), out)
    robust.verify_communication(own(whole(), 2), own(whole(), 1), "all_to_all")
    assert robust.calculate_expected_shape(own(whole(), 2), "all_to_all") == (1, 2, 4)
    calls[0] = 0
    with (
        patch.object(parallel, "all_to_all", failing),
        pytest.raises(HardwareError, match=r"failed 1 times: rank 0: connection closed by peer$"),
    ):
        RobustCommunication(max_retries=0).safe_all_to_all(own(whole(), 1), world())
    return waits, calls[0]


def _averaged(decay: float) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    ema = copy.deepcopy(model)
    model_sharding(ema)
    nn.init.ones_(model.weight)
    update_ema(ema_model=ema, model=model, optimizer=None, decay=decay, sharded=True)
    return [weight.detach() for weight in ema.parameters()]


def _run(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    # Parameters of no dimension and of no elements are divided, too.
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.5 + seed), requires_grad=False))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    scheduler = create_lr_scheduler(optimizer, 10, 2, warmup_steps=4, use_cosine_scheduler=True)
    return {"model": model, "ema": copy.deepcopy(model), "optimizer": optimizer, "lr_scheduler": scheduler}


def _saved(folder: str, async_io: bool) -> None:
    saved, other, io = _run(0), _run(1), CheckpointIO()
    shapes = record_model_param_shape(saved["ema"])
    saved["ema"][1].running_mean += 3
    expected = copy.deepcopy(saved["ema"].state_dict())
    model_sharding(saved["ema"])
    wrapped = saved | {"model": DistributedDataParallel(saved["model"])}
    where = io.save(None, folder, **wrapped, epoch=1, step=2, global_step=8, ema_shape_dict=shapes, async_io=async_io)
    assert io.load(None, where, **other | {"model": DistributedDataParallel(other["model"])}, strict=True) == (1, 2)
    for name, tensor in saved["model"].state_dict().items():
        assert torch.equal(other["model"].state_dict()[name], tensor)
    for name, tensor in expected.items():
        assert torch.equal(other["ema"].state_dict()[name], tensor)


def _not_saved(folder: str, async_io: bool) -> None:
    blocked = Path(folder, "file") / str(async_io)
    if dist.get_rank() == 0:
        blocked.parent.touch()
    io = CheckpointIO()

    def save() -> None:
        io.save(None, blocked, nn.Linear(2, 2), async_io=async_io)
        io.wait()

    with pytest.raises(OutputError, match="cannot write"):
        save()


@pytest.mark.parametrize("function", [_named, _scheduled])
def test_names_of_parallelism(pool, function):
    pool(2).run(function)


def test_all_ranks_retry_or_none(pool):
    assert pool(2).run(_retried) == [([1.0, 2.0], 1), ([1.0, 2.0], 1)]


def test_averages_in_pieces_move_as_whole_ones(pool):
    alone, pieces = _averaged(0.9), pool(2).run(_averaged, 0.9)
    for index, expected in enumerate(alone):
        joined = torch.cat([piece[index] for piece in pieces])[: expected.numel()]
        assert_close(joined, expected)


@pytest.mark.parametrize("async_io", [True, False])
def test_one_rank_writes_for_all_and_all_raise_its_errors(pool, tmp_path, async_io):
    pool(2).run(_saved, str(tmp_path), async_io)
    pool(2).run(_not_saved, str(tmp_path), async_io)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch1-global_step8", "file"]
