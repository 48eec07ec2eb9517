"""Faults planted in the engine are found, each by one check. Faults of streams and copies are in `test_training.py`."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from fake_cuda.checks import (
    collective_faults,
    copy_faults,
    device_faults,
    dtype_faults,
    memory_faults,
    order_faults,
    sync_faults,
)
from fake_cuda.collectives import World
from fake_cuda.generation import MAY_WAIT, rehearse
from fake_cuda.weights import full_size_settings

from opensora_cli.engine.generate import denoise as generate_denoise
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel import sequence
from opensora_cli.sampling import denoise as sampling_denoise

SMALL = {
    "video__num_frames": 5,
    "sampling__num_inference_steps": 2,
    "sampling__guidance_scale": 1.0,
    "text__t5_max_length": 17,
    "model__hidden_size": 128,
    "model__num_heads": 2,
    "model__axes_dim": [16, 24, 24],
    "model__context_in_dim": 64,
    "model__vec_in_dim": 64,
    "model__depth": 1,
    "model__depth_single_blocks": 0,
    "vae__block_out_channels": [32, 32, 32, 32],
    "vae__layers_per_block": 1,
}


def found(turns):
    """Return what each check finds in the turns of all ranks, those that find nothing left out."""
    lines = {"collectives": [*collective_faults({rank: turn.log for rank, turn in turns.items()})]}
    for turn in turns.values():
        log, planned = turn.log, turn.planned
        for name, faults in {
            "dtypes": dtype_faults(log),
            "devices": device_faults(log, turn.device),
            "copies": copy_faults(log),
            "waits": sync_faults(log, stage="denoise", allowed=MAY_WAIT),
            "order": order_faults(log),
            "memory": memory_faults(log, planned),
        }.items():
            lines.setdefault(name, []).extend(faults)
    return {name: each for name, each in lines.items() if each}


def changed(owner, name, made):
    """Plant what `made` makes of a function of the engine."""
    return mock.patch.object(owner, name, made(getattr(owner, name)))


def step(does: Callable[[torch.Tensor], object]):
    """Plant something that is done with the velocity at each step."""

    def made(original):
        def euler_step(latents, velocity_BND, **times):
            does(velocity_BND)
            return original(latents, velocity_BND, **times)

        return euler_step

    return changed(sampling_denoise, "euler_step", made)


def one_fewer():
    """One rank does not take part in gathering what all have computed."""

    def made(_):
        return lambda tensor, dim, group, *, sizes: torch.cat([tensor] * 2, dim).narrow(dim, 0, sum(sizes)).clone()

    return changed(sequence, "gather_forward_split_backward", made)


def index_of_host():
    """A tensor of the device is indexed by one of the host."""

    def made(pack):
        def packed(*given):
            packed_BND = pack(*given)
            return packed_BND[:, torch.arange(packed_BND.shape[1])]

        return packed

    return changed(generate_denoise, "pack_latents", made)


def two_dtypes():
    """A weight of a bf16 model is left in fp32."""

    def made(text_tokens):
        def with_one(self, *given, **inputs):
            self.txt_in.weight = torch.nn.Parameter(self.txt_in.weight.float())
            return text_tokens(self, *given, **inputs)

        return with_one

    return changed(MMDiT, "text_tokens", made)


def kept_too_long():
    """Something is kept of every step."""
    kept = []
    return step(lambda velocity_BND: kept.append(velocity_BND.new_empty(2**20)))


FAULTS = {
    "a collective is left out": (2, one_fewer, "collectives", "call {0: "),
    "a tensor of the host among those of the GPU": (1, index_of_host, "devices", "between cpu, cuda"),
    "a product of bf16 and fp32": (1, two_dtypes, "dtypes", "bfloat16, float32"),
    "memory that is not planned": (1, kept_too_long, "memory", "are planned"),
}
"""The number of ranks, the fault of the last rank, the check that finds it, and a part of its message."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_check_alone(tmp_path, name):
    size, plant, check, says = FAULTS[name]
    settings, world = full_size_settings(tmp_path, "256px", **SMALL, parallel__gpus=size), World(size)
    turns = {rank: rehearse(settings, world, rank) for rank in range(size - 1)}
    with plant():
        turns[size - 1] = rehearse(settings, world, size - 1)
    faults = found(turns)
    assert list(faults) == [check]
    assert any(says in line for line in faults[check]), faults
