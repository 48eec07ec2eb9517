"""Generation on GPUs that are not there: what every rank asks of its device is logged, and checked."""

import torch
from fake_cuda.checks import collective_faults, faults, memory_faults
from fake_cuda.collectives import World
from fake_cuda.generation import full_size, rehearse

FEW_BLOCKS = {"video__num_frames": 33, "model__depth": 2, "model__depth_single_blocks": 3}
"""Of full width: what differs from block to block is nothing."""


def wrong(turns):
    """Return what is wrong with the turns of the ranks of a world."""
    found = []
    for rank, turn in turns.items():
        found += [f"rank {rank}: {fault}" for fault in faults(turn.log, turn.device, stage="denoise")]
    return [*found, *collective_faults({rank: turn.log for rank, turn in turns.items()})]


def planned(turn):
    """Return the bytes that each stage is planned to take."""
    return {stage.name: stage.total_bytes for stage in turn.plan.stages}


def test_an_evaluation_of_one_of_8_ranks(tmp_path):
    settings = full_size(tmp_path, "768px", **FEW_BLOCKS)
    turn = rehearse(settings, World(8), 0)
    assert turn.device == torch.device("cuda", 0)
    assert wrong({0: turn}) == []
    assert list(memory_faults(turn.log, planned(turn))) == []
