"""`compile=true` in a run: one graph for each kind of block, whatever is made."""

from functools import partial

import pytest
import torch
from tiny_world import demo_settings
from torch._dynamo.utils import counters

from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.generate import models
from opensora_cli.engine.generate.run import generate


class _Warnings(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.mark.slow
def test_samples_seeds_and_prompts_of_several_runs_share_the_graphs(world, tmp_path, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(models, "compile_blocks", partial(compile_blocks, backend="eager"))
    settings = demo_settings(world, tmp_path, compile="true", sampling__num_samples="2")
    reporter = _Warnings()
    first = generate(settings, reporter=reporter)
    second = generate(settings.replace({"prompt": "sea", "sampling.seed": 7}), reporter=reporter)
    assert len(first.videos) == len(second.videos) == 2
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    assert reporter.warnings == []
    torch._dynamo.reset()
