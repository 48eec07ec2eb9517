"""An autoencoder and its discriminator, trained by two processes: what one process makes of the same batches."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_autoencoders import UNCLIPPED, mixed_batches, vae_task, vae_trainer
from torch import Tensor

from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.parallelize import shard
from opensora_cli.parallel.mesh import ParallelMesh
from opensora_cli.parallel.shares import MeshShape

_STEPS = 2
# With the usual eps, AdamW's first steps would turn the sign of even the smallest gradient into a full step.
_OPTIMIZER = UNCLIPPED.replace({"eps": 1e-3})
_OBJECTIVE = {
    "squared_error_weight": 1.0,
    "single_frame_share": 0.3,
    "discriminator": {"weight": 0.05, "width": 8, "layers": 2, "start_step": 1, "learning_rate": 1e-3},
}


def _trained(kind: str, ranks: int, micro_batches: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the figures of each step, and all weights and gradients at the end."""
    device = torch.device("cpu")
    distribution = Distribution(device)
    if ranks > 1:
        distribution = Distribution(device, ParallelMesh(MeshShape(replicate=ranks), device_type="cpu"))
    task = vae_task(kind, optimizer=_OPTIMIZER, **_OBJECTIVE)
    task.shard(distribution)
    batches = mixed_batches(kind, rank=distribution.data_rank, ranks=distribution.data_ranks)
    trainer = vae_trainer(
        task,
        batches,
        steps=_STEPS,
        micro_batches=micro_batches,
        optimizer=_OPTIMIZER,
        distribution=distribution,
    )
    figures = [dict(trainer.do_step().figures) for _ in range(_STEPS)]
    found = {}
    for name, learner in trainer.learners.items():
        for parameter, weight in learner.weights.items():
            assert weight.grad is not None
            found[f"{name}.{parameter}"] = weight.detach().clone()
            found[f"gradient of {name}.{parameter}"] = weight.grad.clone()
    return figures, found


@pytest.mark.parametrize(("kind", "micro_batches"), [("hunyuan", 4), ("dc_ae", 2)])
def test_two_processes_train_as_one(pool: Callable[[int], Any], kind: str, micro_batches: int) -> None:
    figures, expected = _trained(kind, 1, micro_batches)
    assert "adversarial_weight" not in figures[0]
    assert all(each["adversarial_weight"] > 0 for each in figures[1:])
    answers = pool(2).run(_trained, kind, 2, micro_batches)
    for our_figures, found in answers:
        assert [each.keys() for each in our_figures] == [each.keys() for each in figures]
        for ours, theirs in zip(our_figures, figures, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert found.keys() == expected.keys()
        largest = max(float(value.abs().max()) for name, value in expected.items() if name.startswith("gradient"))
        for name, value in expected.items():
            tolerance = 1e-5 * largest if name.startswith("gradient") else 1e-5
            assert torch.allclose(found[name], value, rtol=1e-4, atol=tolerance), name
    for name, value in answers[0][1].items():
        assert torch.equal(value, answers[1][1][name]), name


def _warned_of_layouts() -> list[str]:
    """Return what is warned of in the backward pass of a 1x1x1 convolution."""
    device = torch.device("cpu")
    distribution = Distribution(device, ParallelMesh(MeshShape(replicate=2), device_type="cpu"))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            forward = shard(torch.nn.Conv3d(8, 8, 1), distribution)
            # Of 16 clips or more oneDNN computes the gradient, with any number of threads, in a layout of its own.
            clips = torch.ones(16, 8, 2, 4, 4).contiguous(memory_format=torch.channels_last_3d)
            with distribution.accumulating(last=True):
                forward(clips).square().sum().backward()
    finally:
        torch.set_warn_always(False)
    return [str(each.message) for each in warned]


def test_layouts_of_gradients_that_mean_nothing_are_not_warned_of(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_warned_of_layouts) == [[], []]
