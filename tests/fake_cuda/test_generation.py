"""Generation on GPUs that are not there: what every rank asks of its device is logged, and checked."""

from dataclasses import dataclass, field

import pytest
import torch
from fake_cuda.checks import collective_faults, faults, memory_faults
from fake_cuda.collectives import World
from fake_cuda.device import GIB, GPU_BYTES
from fake_cuda.generation import MAY_WAIT, rehearse
from fake_cuda.log import Collective, Copy, Log, Stage, lines_of
from fake_cuda.weights import full_size_settings

from opensora_cli.engine.components.architectures import on_meta
from opensora_cli.memory.host_weights import _MappedWeights
from opensora_cli.models.text.sizes import T5Sizes
from opensora_cli.models.text.t5 import T5Model

FEW_BLOCKS = {"video__num_frames": 33, "model__depth": 1, "model__depth_single_blocks": 1}
"""Of full width: what differs from block to block is nothing."""
ONE_BRANCH = {"sampling__guidance_scale": 1.0}
ALL_BLOCKS = {"video__num_frames": 129, "model__depth": 19, "model__depth_single_blocks": 38, **ONE_BRANCH}
NO_DOUBLE_BLOCK = {"model__depth": 0, **ONE_BRANCH}
PICTURE = {"picture__model__depth": 1, "picture__model__depth_single_blocks": 1}
PINNED = {"memory__offload": "blocks", "memory__resident_blocks": 1, "memory__host_weights": "pinned"}
MAPPED = {**PINNED, "memory__host_weights": "mapped"}
FP8 = {"memory__fp8_storage": True}
INT8_PRODUCTS, FP8_PRODUCTS = {"precision__linear": "int8"}, {"precision__linear": "fp8"}


@dataclass(frozen=True)
class Row:
    """A run: its preset, how many ranks it has, and what else differs from the preset."""

    preset: str
    size: int = 1
    mode: str = "t2v"
    changes: dict = field(default_factory=dict)
    given: tuple = ()
    """`adapter`, or `text` encoders."""
    does: tuple = ()
    """What is rehearsed beside sampling: `encodes`, `decodes`."""
    memory_bytes: int = GPU_BYTES
    turns: tuple[int, ...] | None = None
    """The ranks that take one, rank 0 first; None: all."""


def along(**degrees):
    """Return ranks along these axes, which compute one branch."""
    return {**{f"parallel__{name}_degree": degree for name, degree in degrees.items()}, **ONE_BRANCH}


ROWS = {
    # presets
    "768px": Row("768px"),
    "256px from a picture": Row("t2i2v_256px", mode="i2v_head", changes=PICTURE),
    "high compression": Row("high_compression", changes={**PICTURE, "video__num_frames": 32}, does=("decodes",)),
    "a picture": Row("flux1_dev", changes={"video__num_frames": 1}),
    "demo": Row("demo", changes={"video__num_frames": 17}),
    "two samples": Row("256px", changes={"sampling__num_samples": 2}),
    # conditions and offload
    "first frame, one model at a time": Row("256px", mode="i2v_head", changes={"memory__offload": "model"}),
    "last frame, pinned, on another GPU": Row(
        "256px", mode="i2v_tail", changes={**PINNED, "runtime__device": "cuda:3"}
    ),
    "first frames, mapped": Row("256px", mode="v2v_head", changes={"video__num_frames": 65, **MAPPED}),
    "more last frames, adapter, 8 bits, mapped": Row(
        "256px", mode="v2v_tail_easy", changes={"video__num_frames": 97, **FP8, **MAPPED}, given=("adapter",)
    ),
    "products in int8, pinned": Row("256px", changes={**INT8_PRODUCTS, **PINNED}),
    "products in fp8, the rest stored so, tensor parallel": Row(
        "256px", 2, changes=along(tensor_parallel=2) | FP8_PRODUCTS | FP8
    ),
    # meshes
    "tensor parallel": Row("256px", 2, changes=along(tensor_parallel=2)),
    "Ulysses, both ends": Row("256px", 2, "i2v_loop", {"parallel__ulysses_degree": 2}),
    "ring": Row("768px", 2, changes=along(ring=2)),
    "three branches": Row("256px", 3, "i2v_loop", {"parallel__cfg_parallel_degree": 3}),
    "tensor parallel and Ulysses, adapter, 8 bits": Row(
        "768px", 4, changes=along(tensor_parallel=2, ulysses=2) | FP8 | {"video__num_frames": 129}, given=("adapter",)
    ),
    "branches, ring and Ulysses": Row(
        "256px", 8, changes={"parallel__cfg_parallel_degree": 2, "parallel__ring_degree": 2}
    ),
    "8 bits on the way": Row("256px", 2, changes=along(ulysses=2) | {"parallel__compression": "fp8"}),
    "Ulysses in two stages on 2 machines": Row(
        "256px", 16, changes=along(ulysses=16) | {"parallel__all_to_all": "hierarchical"}
    ),
    "64 ranks": Row("768px", 64, changes={"video__num_frames": 5}),
    # of full depth
    "768px, all blocks, one of 8 ranks": Row("768px", 8, changes=ALL_BLOCKS, turns=(0,)),
    # other stages
    "draft": Row("768px", changes={"draft__resolution": "256px"}),
    "step cache, branches": Row(
        "256px",
        2,
        changes={"sampling__num_inference_steps": 8, "sampling__step_cache": 0.6, "parallel__cfg_parallel_degree": 2},
    ),
    "extended": Row("256px", changes={"video__extend": 1, "video__num_frames": 37}, does=("decodes",)),
    "texts": Row("256px", changes=NO_DOUBLE_BLOCK, given=("text",), does=("encodes",)),
    # of many tiles, so that each rank has a whole one
    "frames of 2 ranks": Row("768px", 2, changes=NO_DOUBLE_BLOCK | {"video__num_frames": 5}, does=("decodes",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_rank_asks_for_what_it_may_and_takes_the_memory_that_is_planned(tmp_path, row):
    """At full depth rank 0 of 8 takes a turn."""
    rehearsed_without_faults(tmp_path, row)


@pytest.mark.slow
def test_t5_comes_layer_by_layer_where_it_has_no_room(tmp_path):
    row = Row("256px", changes=NO_DOUBLE_BLOCK | PINNED, given=("text",), does=("encodes",), memory_bytes=8 * GIB)
    turn = rehearsed_without_faults(tmp_path, row)
    assert turn.chain.video.offload.stream_text
    with on_meta():
        layers = T5Model(T5Sizes()).encoder.block.parameters()
    pieces = lines_of(_MappedWeights._copy_piece)
    copied = [entry for entry in turn.log.entries if isinstance(entry, Copy) and entry.where in pieces]
    layers_bytes = torch.bfloat16.itemsize * sum(map(torch.numel, layers))
    assert sum(entry.reads[0].stop - entry.reads[0].start for entry in copied) >= layers_bytes


def sampling_stages(log):
    stages = {entry.stage for entry in log.entries if isinstance(entry, Stage)}
    return sorted(stage for stage in stages if stage.endswith("denoise"))


def rehearsed_without_faults(folder, row):
    machines = -(-row.size // 8)
    blocks = {} if row.preset == "demo" else FEW_BLOCKS
    settings = full_size_settings(
        folder,
        row.preset,
        parallel__gpus=row.size // machines,
        parallel__nnodes=machines,
        condition__mode=None if row.preset.startswith(("t2i2v", "high", "flux")) else row.mode,
        **dict.fromkeys(row.given, True),
        **blocks | row.changes,
    )
    world, logs = World(row.size), {}
    for rank in row.turns or range(row.size):
        turn = rehearse(settings, world, rank, memory_bytes=row.memory_bytes, **dict.fromkeys(row.does, True))
        for stage in sampling_stages(turn.log):
            assert faults(turn.log, turn.device, stage=stage, allowed=MAY_WAIT) == [], stage
        assert list(memory_faults(turn.log, turn.planned)) == []
        # The rest of the logs of many ranks would take gigabytes.
        logs[rank] = Log(rank, [entry for entry in turn.log.entries if isinstance(entry, Collective)])
    assert list(collective_faults(logs)) == []
    return turn
