"""Training on GPUs that are not there: what every rank asks of its device in a step is logged, and checked."""

import pytest
from fake_cuda.checks import collective_faults, faults, memory_faults
from fake_cuda.collectives import World
from fake_cuda.guard import why_no_backward
from fake_cuda.log import MAIN, Synchronized
from fake_cuda.training import MAY_WAIT, STEP, recipe, rehearse, with_weights
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from opensora_cli.engine.train.distribution import Distribution
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
    """Return what is wrong with the turns of the ranks of a world."""
    found = []
    for rank, turn in turns.items():
        found += [f"rank {rank}: {fault}" for fault in faults(turn.log, turn.device, stage=STEP, allowed=MAY_WAIT)]
    return [*found, *collective_faults({rank: turn.log for rank, turn in turns.items()})]


def memory_is_as_planned(turn, rank=0):
    """Whether a rank takes what is planned, to a tenth."""
    planned = estimate_training(turn.settings, rank=rank).device_peak_bytes
    return list(memory_faults(turn.log, {STEP: planned})) == []


def waits(turn):
    """Return how often the main thread waits for the device, by the module that does."""
    log, counts = turn.log, {}
    for entry in log.entries:
        if isinstance(entry, Synchronized) and entry.thread == MAIN:
            module = entry.where.split(":")[0]
            counts[module] = counts.get(module, 0) + 1
    return counts


@pytest.mark.slow
def test_a_step_of_an_adapter_beside_streamed_blocks(tmp_path):
    turn = rehearse(with_weights(tmp_path, recipe("stage1_lora_16gib", **LORA)))
    assert wrong({0: turn}) == []
    # One loss, and the norm of the gradient.
    assert waits(turn)["engine/train/trainer.py"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "changes"),
    [
        (33, {"memory__host_weights": "pinned"}),
        (
            129,
            {
                "memory__host_weights": "mapped",
                "memory__fp8_storage": True,
                "model__depth": 2,
                "model__depth_single_blocks": 4,
            },
        ),
        (129, {"memory__host_weights": "pinned", "memory__checkpointing": "offload", **FEW}),
    ],
)
def test_an_adapter_of_the_11b_model_in_16_gib(tmp_path, frames, changes):
    clips = {33: 3, 129: 1}[frames]
    settings = recipe("stage1_lora_16gib", data__buckets={"256px": {frames: [1.0, clips]}}, **changes)
    turn = rehearse(with_weights(tmp_path, settings))
    assert wrong({0: turn}) == []
    assert memory_is_as_planned(turn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "strategy", "changes"),
    [
        (2, "ddp", {"memory__checkpointing": "selective"}),
        (2, "zero2", {"loop__micro_batches": 4}),
        (4, "zero3", {"loop__micro_batches": 8}),
        (4, "hybrid", {"parallel__ring_degree": 2, "parallel__ulysses_degree": 2}),
        (4, "hybrid", {"parallel__tensor_parallel_degree": 2, "parallel__ulysses_degree": 2}),
        (8, "hybrid", {"parallel__tensor_parallel_degree": 2, "parallel__ring_degree": 2}),
    ],
)
def test_every_rank_of_a_strategy(gpus, strategy, changes):
    settings = recipe("stage1", strategy=strategy, parallel__gpus=gpus, **CACHED, **changes)
    world = World(gpus)
    turns = {rank: rehearse(settings, world, rank) for rank in range(gpus)}
    assert wrong(turns) == []
    assert memory_is_as_planned(turns[0])
    assert memory_is_as_planned(turns[gpus - 1], gpus - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image", "stage1_i2v", "high_compression"])
def test_a_rank_of_a_recipe_with_its_largest_micro_batch(name):
    changes = {} if name.startswith("stage2") else {"parallel__gpus": 8}
    turn = rehearse(recipe(name, **FEW, **changes), World(8), 5)
    assert wrong({5: turn}) == []
    assert memory_is_as_planned(turn, 5)


@pytest.mark.slow
def test_a_rank_of_a_recipe_with_all_of_its_blocks():
    turn = rehearse(recipe("stage2"), World(8), 3)
    assert wrong({3: turn}) == []
    assert memory_is_as_planned(turn, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vae_hunyuan", "vae_dc_ae_disc"])
def test_an_autoencoder_in_the_last_phase_of_its_recipe(name):
    turn = rehearse(recipe(name, init=None, parallel__gpus=2), World(2))
    assert wrong({0: turn}) == []
    assert memory_is_as_planned(turn)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "ranks"), [(8, (0, 63)), (128, (777,))])
def test_ranks_of_many_machines(nodes, ranks):
    settings = recipe("stage2", **CACHED, parallel__nnodes=nodes)
    world = World(8 * nodes)
    turns = {rank: rehearse(settings, world, rank) for rank in ranks}
    assert wrong(turns) == []
    assert memory_is_as_planned(turns[ranks[-1]], ranks[-1])


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
    "a sample is waited for": (
        "stage1",
        CACHED,
        (mmdit, "queued_copy", lambda tensor, device: tensor.to(device)),
        "a blocking copy",
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


@pytest.mark.slow
def test_a_rank_that_leaves_a_collective_out_is_found(monkeypatch):
    settings = recipe("stage1", strategy="hybrid", parallel__gpus=2, parallel__tensor_parallel_degree=2, **CACHED)
    world = World(2)
    turns = {0: rehearse(settings, world, 0)}
    monkeypatch.setattr(Distribution, "_sum_gradients_of_norms", lambda self: None)
    turns[1] = rehearse(settings, world, 1)
    assert any("collectives" in line or "not the same" in line for line in wrong(turns))
