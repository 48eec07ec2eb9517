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
