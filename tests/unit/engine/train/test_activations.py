"""The plan of activation checkpointing, and its effect."""

import pytest
import tiny_training

from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.engine.train.memory import plan_activations
from opensora_cli.engine.train.parallelize import checkpoint_blocks
from opensora_cli.models.mmdit.model import MMDiT


def settings(**memory):
    tiny = tiny_training.mmdit_settings("unused").replace({"model.depth": 2, "model.depth_single_blocks": 3})
    return tiny.replace({f"memory.{key}": value for key, value in memory.items()})


def test_nothing_is_planned_unless_asked():
    assert plan_activations(settings()) is None
    assert plan_activations(tiny_training.vae_settings("unused").replace({"memory.checkpointing": "full"})) is None


@pytest.mark.parametrize(
    ("memory", "blocks"),
    [
        ({}, {"double_blocks": 2, "single_blocks": 3}),
        ({"checkpoint_double_blocks": 1}, {"double_blocks": 1, "single_blocks": 3}),
        ({"checkpoint_single_blocks": 0}, {"double_blocks": 2, "single_blocks": 0}),
    ],
)
def test_blocks(memory, blocks):
    plan = plan_activations(settings(checkpointing="full", **memory))
    assert plan.checkpointed_blocks == blocks
    model = MMDiT(mmdit_config(settings().model))
    checkpoint_blocks(model, plan)
    wrapped = [path for path, part in model.named_modules() if "forward" in vars(part)]
    expected = [f"{stack}.{index}" for stack, count in blocks.items() for index in range(count)]
    assert wrapped == [*expected, "final_layer"]


def test_bytes_on_the_host_depend_on_the_largest_micro_batch_and_the_dtype_of_weights_in_use():
    offloaded = settings(checkpointing="offload").replace({"optimizer.name": "adamw"})
    # Two clips of 4 latent frames, of 3 x 6 tokens each, with 12 text tokens; 2 + 3 blocks and the last layer.
    inputs = 6 * 2 * (72 + 12) * 32
    assert plan_activations(offloaded).host_bytes == 4 * inputs
    assert plan_activations(settings(checkpointing="full")).host_bytes == 0
    adapter = {"lora.rank": 2, "init": "first.safetensors"}
    divided = {"strategy": "zero2", "parallel.gpus": 2, "loop.micro_batches": 2}
    for changes in (adapter, divided):
        assert plan_activations(offloaded.replace({**changes, "precision.compute": "bf16"})).host_bytes == 2 * inputs
        assert plan_activations(offloaded.replace({**changes, "precision.compute": "fp32"})).host_bytes == 4 * inputs
    pictures = offloaded.replace({"data.buckets": {"32px": {13: (1.0, 2), 1: (1.0, 10)}}})
    assert plan_activations(pictures).host_bytes == 4 * 6 * 10 * (18 + 12) * 32
