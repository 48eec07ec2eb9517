"""`osora mem-profile`: what it prints and writes, and its exit codes."""

import json
from pathlib import Path

import pytest
import tiny_training
import yaml

from opensora_cli.settings.train import TrainSettings

KINDS_OF_GPUS = {"cudnn", "flash3", "flash4", "xformers"}
SMALL = ["mem-profile", "--device", "cpu", "--set", "video.num_frames=5", "--set", "model.depth_single_blocks=1"]


def recipe(settings: TrainSettings, folder: Path) -> str:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json", exclude={"weights"})))
    return str(folder / "tiny.yaml")


@pytest.mark.slow
def test_a_generation_is_predicted_within_10_percent_of_what_is_measured(osora, tmp_path: Path) -> None:
    plot = tmp_path / "memory.svg"
    args = [*SMALL, "--runs", "2", "--json", "--plot", str(plot)]
    document = json.loads(osora(*args).out)
    assert document["schema"] == "osora.mem-profile/6"
    assert [stage["name"] for stage in document["stages"]] == ["text", "denoise", "decode"]
    for stage in document["stages"]:
        assert stage["predicted_bytes"] == pytest.approx(stage["measured_bytes"], rel=0.1)
        assert max(stage["timeline"]["live_bytes"]) <= stage["measured_bytes"]
        timed = stage["times"][stage["name"]]
        assert timed["count"] == 2
        assert timed["mean_s"] > 0
    times = document["stages"][1]["times"]
    blocks = {name: spread["count"] for name, spread in times.items() if name != "denoise"}
    assert {name for name in blocks if "single" in name} == {"transformer.single_blocks.0"}
    # Two steps in each of two runs.
    assert all(count % 4 == 0 for count in blocks.values())
    assert document["device"] == "cpu"
    assert "without a GPU" in document["how"]
    assert document["files"] == {"plot": str(plot)}
    assert plot.read_text().startswith("<?xml")

    assert "exists already" in osora(*args, code=3).err


@pytest.mark.slow
def test_a_training_lists_its_kinds_of_memory(tmp_path: Path, osora) -> None:
    config = recipe(tiny_training.vae_settings(tmp_path / "run"), tmp_path)
    captured = osora("mem-profile", "--config", config, "--quiet")
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[1].startswith("profile     training vae, batch 1 on cpu")
    names = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    kinds = ["weights", "optimizer", "average", "activations", "held for backward", "peak"]
    assert names[:6] == kinds


@pytest.mark.slow
def test_the_largest_batch_of_a_training_is_predicted(tmp_path: Path, osora) -> None:
    config = recipe(tiny_training.vae_settings(tmp_path / "run"), tmp_path)
    search = ["--adaptive-batch", "--memory-limit", "40MiB"]
    batch = json.loads(osora("mem-profile", "--config", config, "--runs", "0", *search, "--json").out)["batch"]
    assert batch["batch_size"] > 1
    assert batch["peak_bytes"] <= batch["limit_bytes"] == 40 * 2**20


def test_links_that_lead_nowhere_are_not_replaced(tmp_path: Path, osora) -> None:
    plot = tmp_path / "plot.svg"
    plot.symlink_to(tmp_path / "nothing")
    assert "exists already" in osora(*SMALL, "--plot", str(plot), code=3).err


@pytest.mark.slow
def test_attention_backends_are_compared(osora) -> None:
    costs = json.loads(osora(*SMALL, "--compare", "--runs", "0", "--json").out)["attention"]
    flash, standard = (
        {cost["tokens"]: cost["memory_bytes"] for cost in costs if cost["kind"] == kind}
        for kind in ("flash", "standard (math)")
    )
    missing = {cost["kind"]: cost["reason"] for cost in costs if cost["kind"] in KINDS_OF_GPUS}
    assert missing.keys() == KINDS_OF_GPUS
    assert missing["cudnn"] == "cudnn runs on CUDA devices only, and this is cpu"
    assert all(missing.values())
    assert flash[4096] == 4 * flash[1024]  # linear
    assert standard[4096] > 14 * standard[1024]  # quadratic
