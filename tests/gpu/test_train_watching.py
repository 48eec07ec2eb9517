"""Watching a run on a GPU: the parts of steps for Nsight and in traces, seconds of the GPU, videos."""

import json
from pathlib import Path

import pytest
import tiny_frozen
import tiny_training

from opensora_cli.engine.train.run import train
from opensora_cli.media.read import probe


def run(output: Path, frozen: Path, **changes: object) -> list[dict[str, object]]:
    settings = tiny_training.mmdit_settings(output, frozen).replace(
        {"device": "cuda", "optimizer.name": "adamw", **changes}
    )
    train(settings)
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_frozen.save_frozen_parts(tmp_path_factory.mktemp("frozen"))


def test_everything_at_once(tmp_path: Path, frozen: Path) -> None:
    lines = run(
        tmp_path / "watched",
        frozen,
        **{
            "watching.peak_tflops": 1e-3,
            "validation.every": 2,
            "validation.table": tiny_training.HELD_OUT,
            "samples.every": 4,
            **tiny_training.SAMPLE_SIZE,
            "samples.prompts": ("rain",),
            "samples.num_inference_steps": 2,
        },
    )
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["mfu"] > 0 and line["peak_allocated_gib"] > 0 for line in steps)
    assert [line["step"] for line in lines if line.get("event") == "validation"] == [0, 2, 4]
    assert probe(tmp_path / "watched" / "samples" / "step4" / "0.mp4").num_frames == 13
