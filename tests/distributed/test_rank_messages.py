"""What ranks tell each other: JSON, in groups of any kind."""

import re
from pathlib import Path

import torch.distributed as dist

import opensora_cli
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json

VALUES = [None, 0.1, "\ud83d snow ❄", ["a", 1, None, {"b": [True]}]]


def _told(values):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([ranks - 2, ranks - 1])
    from_first = [broadcast_json(value if rank == 0 else "not this") for value in values]
    gathered = all_gather_json("x" * rank)
    in_pair = (broadcast_json(rank, pair), all_gather_json([rank], pair)) if rank >= ranks - 2 else None
    dist.barrier()
    return from_first, gathered, in_pair


def test_all_ranks_of_a_group_hear_its_first_rank_and_each_other(pool):
    for rank, (from_first, gathered, in_pair) in enumerate(pool(4).run(_told, VALUES)):
        assert from_first == VALUES
        assert gathered == ["", "x", "xx", "xxx"]
        assert in_pair == ((2, [[2], [3]]) if rank >= 2 else None)


def test_nothing_of_ours_sends_objects_as_pickles():
    package = Path(opensora_cli.__file__).parent
    found = [
        path
        for path in package.rglob("*.py")
        if re.search(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(", path.read_text("utf-8"))
    ]
    assert found == []
