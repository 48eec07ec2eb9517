"""The plan of what is held between forward and backward."""

from pathlib import Path

import pytest
import tiny_training
import torch

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.train.activations import plan_activations, saved_activations
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.files import list_presets
from opensora_cli.settings.train import load_train_settings


def settings(**memory):
    tiny = tiny_training.mmdit_settings("unused").replace({"model.depth": 2, "model.depth_single_blocks": 3})
    return tiny.replace({f"memory.{key}": value for key, value in memory.items()})


def test_nothing_is_planned_unless_asked():
    assert plan_activations(settings()) is None
    assert plan_activations(tiny_training.vae_settings("unused").replace({"memory.checkpointing": "full"})) is None
    with saved_activations(torch.nn.Linear(1, 1), None) as manager:
        assert manager is None


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
    with saved_activations(model, plan):
        wrapped = [path for path, part in model.named_modules() if "forward" in vars(part)]
    expected = [f"{stack}.{index}" for stack, count in blocks.items() for index in range(count)]
    assert wrapped == [*expected, "final_layer"]
    assert not any("forward" in vars(part) for part in model.modules())


def test_the_buffer_holds_a_step():
    # Two clips of 4 latent frames, of 3 x 6 tokens each, with 12 text tokens; 2 + 3 blocks and the last layer.
    plan = plan_activations(settings(checkpointing="offload"))
    latents, joint, width, angles = 72, 84, 32, 8
    streams = (2 * joint + 3 * joint + latents) * width
    shared = joint * 2 * angles + width
    assert plan.needed_bytes == plan.buffer_bytes == 4 * 2 * (streams + shared)
    larger = settings(checkpointing="offload", activation_buffer=10**6)
    assert plan_activations(larger).buffer_bytes == 10**6
    assert plan_activations(settings(checkpointing="full")).buffer_bytes == 0


def test_a_buffer_that_is_too_small_for_a_step_or_too_large_for_the_host_is_refused():
    needed = plan_activations(settings(checkpointing="offload")).needed_bytes
    message = f"activation_buffer={needed - 4} is too small for a step of 2 clips: use at least {needed}"
    with pytest.raises(RequestError, match=message):
        plan_activations(settings(checkpointing="offload", activation_buffer=needed - 4))
    huge = plan_activations(settings(checkpointing="offload", activation_buffer=2**60))
    with pytest.raises(HardwareError, match="no host memory for a buffer of"), saved_activations(None, huge):
        pass


def test_what_is_offloaded_has_the_dtype_of_the_weights_in_use():
    offloaded = settings(checkpointing="offload").replace({"optimizer.name": "adamw"})
    assert plan_activations(offloaded).dtype is torch.float32
    adapter = {"lora.rank": 2, "init": "first.safetensors"}
    divided = {"strategy": "zero2", "parallel.gpus": 2, "loop.micro_batches": 2}
    for changes in (adapter, divided):
        assert plan_activations(offloaded.replace({**changes, "precision.compute": "bf16"})).dtype is torch.bfloat16
        assert plan_activations(offloaded.replace({**changes, "precision.compute": "fp32"})).dtype is torch.float32


def test_the_buffer_holds_pictures_if_they_have_more_tokens():
    offloaded = settings(checkpointing="offload")
    few, many = (offloaded.replace({"data.buckets": {"32px": {13: (1.0, 2), 1: (1.0, count)}}}) for count in (4, 10))
    assert plan_activations(few).needed_bytes == plan_activations(offloaded).needed_bytes
    # One latent frame of 18 tokens instead of 4, with 12 of text; and 10 instead of 2.
    assert plan_activations(many).needed_bytes > 1.4 * plan_activations(offloaded).needed_bytes


@pytest.mark.parametrize("name", list_presets("train"))
def test_every_recipe_fits_its_buffer(name):
    plan = plan_activations(load_train_settings(config=Path(name), overrides={}, environment={}))
    assert plan is None or plan.needed_bytes <= plan.buffer_bytes


def test_words():
    plan = plan_activations(settings(checkpointing="full", checkpoint_double_blocks=1))
    assert plan.line() == "checkpoints in 1 double_blocks and 3 single_blocks"
    plan = plan_activations(settings(checkpointing="offload", activation_buffer=2 * 10**6))
    assert plan.line().endswith("3 single_blocks, their inputs on the host, buffer 2.0 MB")
    plan = plan_activations(settings(checkpointing="selective"))
    assert plan.line().endswith("3 single_blocks, results of attention are kept")
    assert plan.to_json() == {
        "checkpointing": "selective",
        "checkpointed_blocks": {"double_blocks": 2, "single_blocks": 3},
        "needed_bytes": 0,
        "buffer_bytes": 0,
    }
