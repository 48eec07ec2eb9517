"""The benchmark for a GPU on one that is not there: all that it asks of CUDA is asked once before it costs anything."""

import json
from contextlib import ExitStack
from unittest import mock

import gpu
import gpu_bench
import gpu_parts
import gpu_stages
import pytest
from fake_cuda.guard import accelerator
from fake_cuda.session import rehearsal
from torch.utils._python_dispatch import _disable_current_modes

from opensora_cli.engine.estimate.generation_work import evaluation_work
from opensora_cli.engine.generate.planning import make_plan
from opensora_cli.engine.train.activations import plan_activations


def unfaked(function, **options):
    """Return a function that counts on tensors of another kind."""

    def run(*args):
        with _disable_current_modes():
            return function(*args, **options)

    return run


def rehearsed(tmp_path, name):
    """Return the figures of a part on a fake GPU."""
    out = tmp_path / "gpu.json"
    with rehearsal() as turn, ExitStack() as stack:
        stack.enter_context(accelerator(turn.queues))
        stack.enter_context(mock.patch.object(gpu_bench, "make_plan", unfaked(make_plan, tries_device=False)))
        stack.enter_context(mock.patch.object(gpu_stages, "plan_activations", unfaked(plan_activations)))
        stack.enter_context(mock.patch.object(gpu_parts, "SETTINGS", SETTINGS))
        for module in (gpu_bench, gpu_stages):
            stack.enter_context(mock.patch.object(module, "evaluation_work", unfaked(evaluation_work)))
        gpu.main(["--tiny", "--out", str(out), "--part", name])
    document = json.loads(out.read_text())
    assert document["device"] == "fake H100"
    [part] = document["parts"]
    assert part["status"] == "done", part
    assert [row for row in part["rows"] if "failed" in row] == []
    return part["rows"]


SETTINGS = {name: gpu_parts.SETTINGS[name] for name in ("as it is", "weights stored in 8 bits")}
"""Others compare values, or compile for the device."""
NOT_REHEARSED = ("text", "collectives")
"""T5 has one size, which is not tiny, and links are measured by another program."""
FAST = ("rates", "attention")


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in gpu.PARTS
        if name not in NOT_REHEARSED
    ],
)
def test_a_part_asks_a_gpu_for_what_it_may(tmp_path, name):
    assert any("seconds" in row for row in rehearsed(tmp_path, name))
