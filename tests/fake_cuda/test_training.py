"""Training on GPUs that are not there: what every rank asks of its device in a step is logged, and checked."""

from dataclasses import dataclass, field

import pytest
from fake_cuda.checks import collective_faults, faults, memory_faults
from fake_cuda.collectives import World
from fake_cuda.guard import why_no_backward
from fake_cuda.log import MAIN, Synchronized
from fake_cuda.training import MAY_WAIT, STEP, recipe, rehearse, with_weights
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from opensora_cli.engine.train.estimate import estimate_training
from opensora_cli.engine.train.objectives import mmdit
from opensora_cli.memory.host_memory import SideStream
from opensora_cli.memory.streaming import _Streamer

pytestmark = pytest.mark.skipif(why_no_backward() is not None, reason=str(why_no_backward()))

FEW = {"model__depth": 1, "model__depth_single_blocks": 2, "memory__checkpoint_double_blocks": None}
"""Blocks, of full width: what differs from block to block is nothing."""
CACHED = {**FEW, "train_mmdit__cache": "cache", "data__buckets": {"256px": {33: [1.0, 1]}}}
LORA = {**CACHED, "memory__host_weights": "pinned"}


def wrong(turns):
    found = []
    for rank, turn in turns.items():
        found += [f"rank {rank}: {fault}" for fault in faults(turn.log, turn.device, stage=STEP, allowed=MAY_WAIT)]
    return [*found, *collective_faults({rank: turn.log for rank, turn in turns.items()})]


@dataclass(frozen=True)
class Row:
    """A step: its recipe, what differs from that, the number of ranks, and those that take a turn (None: all)."""

    recipe: str
    changes: dict = field(default_factory=dict)
    size: int = 1
    turns: tuple[int, ...] | None = None
    plans_memory: bool = True


def clips(frames, batch_size):
    return {"data__buckets": {"256px": {frames: [1.0, batch_size]}}}


def divided(strategy, gpus, **changes):
    return Row("stage1", {**CACHED, "strategy": strategy, "parallel__gpus": gpus, **changes}, gpus)


MANY = {"memory__fp8_storage": True, "model__depth": 2, "model__depth_single_blocks": 4}
PINNED, MAPPED = {"memory__host_weights": "pinned"}, {"memory__host_weights": "mapped"}
OFFLOAD = {"memory__checkpointing": "offload"}
ULYSSES, RING = {"parallel__ulysses_degree": 2}, {"parallel__ring_degree": 2}
TENSOR = {"parallel__tensor_parallel_degree": 2}
ROWS = {
    "an adapter beside streamed blocks": Row("stage1_lora_16gib", LORA, plans_memory=False),
    # of the 11B model in 16 GiB
    "an adapter, pinned": Row("stage1_lora_16gib", {**clips(33, 3), **PINNED}),
    "an adapter, mapped, in 8 bits": Row("stage1_lora_16gib", {**clips(129, 1), **MAPPED, **MANY}),
    "an adapter, offloaded": Row("stage1_lora_16gib", {**clips(129, 1), **PINNED, **FEW, **OFFLOAD}),
    # every rank of a strategy
    "ddp": divided("ddp", 2, memory__checkpointing="selective"),
    "zero2": divided("zero2", 2, loop__micro_batches=4),
    "zero3": divided("zero3", 4, loop__micro_batches=8),
    "ring and Ulysses": divided("hybrid", 4, **RING, **ULYSSES),
    "tensor parallel and Ulysses": divided("hybrid", 4, **TENSOR, **ULYSSES),
    "tensor parallel and ring": divided("hybrid", 8, **TENSOR, **RING),
    # a rank with the largest micro-batch of its recipe
    **{name: Row(name, {**FEW, "parallel__gpus": 8}, 8, (5,)) for name in ("image", "stage1_i2v", "high_compression")},
    "stage2 with all of its blocks": Row("stage2", {}, 8, (3,)),
    # the last phase of an autoencoder
    **{name: Row(name, {"init": None, "parallel__gpus": 2}, 2, (0,)) for name in ("vae_hunyuan", "vae_dc_ae_disc")},
    "8 machines": Row("stage2", {**CACHED, "parallel__nnodes": 8}, 64, (0, 63)),
    "128 machines": Row("stage2", {**CACHED, "parallel__nnodes": 128}, 1024, (777,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_ranks_ask_for_what_they_may_and_take_the_memory_that_is_planned(tmp_path, row):
    settings = recipe(row.recipe, **row.changes)
    settings = with_weights(tmp_path, settings) if settings.lora.is_on else settings
    world = World(row.size)
    turns = {rank: rehearse(settings, world, rank) for rank in row.turns or range(row.size)}
    assert wrong(turns) == []
    first_and_last = {0, row.size - 1} & turns.keys() or turns.keys()
    for rank in first_and_last if row.plans_memory else ():
        planned = estimate_training(turns[rank].settings, rank=rank).rank.device_peak_bytes
        assert list(memory_faults(turns[rank].log, {STEP: planned})) == []


@pytest.mark.slow
def test_the_host_waits_for_one_loss_and_the_norm_of_the_gradient(tmp_path):
    turn = rehearse(with_weights(tmp_path, recipe("stage1_lora_16gib", **LORA)))
    waits = [each for each in turn.log.entries if isinstance(each, Synchronized) and each.thread == MAIN]
    assert sum(each.where.startswith("engine/train/trainer.py") for each in waits) == 2


def _float_loss(*arguments, plain=mmdit.get_batch_loss):
    loss = plain(*arguments)
    return loss * (float(loss.detach()) > 0)


FAULTS = {
    "a streamed block is not waited for": (
        "stage1_lora_16gib",
        LORA,
        (SideStream, "wait", lambda self, mark: None),
        "reads memory that",
    ),
    "a streamed block is written over while another is computed": (
        "stage1_lora_16gib",
        LORA,
        (_Streamer, "_copy", lambda self, number, run, free, plain=_Streamer._copy: plain(self, number, run, None)),
        "writes to memory that",
    ),
    "memory of gathered weights is free before its reader is done": (
        "stage1",
        {**CACHED, "parallel__gpus": 2, "strategy": "zero3"},
        (FSDPParamGroup, "_wait_all_gather_streams_on_event", lambda self, event: None),
        "memory is freed that",
    ),
    "a loss is read in the middle of a step": (
        "stage1",
        CACHED,
        (mmdit, "get_batch_loss", _float_loss),
        "waits for the device inside",
    ),
    "a sample comes from memory that is not pinned": (
        "stage1",
        CACHED,
        (mmdit, "queued_copy", lambda tensor, device: tensor.to(device, non_blocking=True)),
        "memory that is not pinned",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path, monkeypatch, fault):
    name, changes, (owner, attribute, stand_in), found = FAULTS[fault]
    settings = recipe(name, **changes)
    settings = with_weights(tmp_path, settings) if settings.lora.is_on else settings
    monkeypatch.setattr(owner, attribute, stand_in)
    turn = rehearse(settings, World(settings.parallel.world_size))
    assert any(found in line for line in wrong({0: turn})), wrong({0: turn})
