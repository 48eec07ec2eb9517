"""`osora train`: results on stdout, messages on stderr, exit codes, and resuming after Ctrl-C."""

import json
import re
import signal
from typing import Any

import pytest
import tiny_training
import torch
import yaml

from opensora_cli.cli.app import main
from opensora_cli.engine.encode.clip_cache import write_header
from opensora_cli.engine.encode.clips import EmptyPrompt
from opensora_cli.engine.train import plan
from opensora_cli.engine.train.objectives.vae import VAETask


@pytest.fixture
def recipe(tmp_path):
    """Arguments that train an autoencoder for four steps."""
    settings = tiny_training.vae_settings(tmp_path / "run").replace({"precision.compute": "fp32"})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    return ["train", "--config", str(tmp_path / "tiny.yaml")]


def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_step = VAETask.begin_step

    def begin(self: VAETask, at: int) -> None:
        begin_step(self, at)
        if at == step:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(VAETask, "begin_step", begin)


def test_dry_run_touches_nothing(recipe, tmp_path, monkeypatch, osora):
    plain = ["--set", "optimizer.name=adamw"]  # estimates take longer for Muon
    document = json.loads(osora(*recipe, "--dry-run", "--json", "--set", "loop.steps=7", *plain).out)
    # It takes seconds, and would find the same.
    memory = plan.RankMemory.model_validate(document["memory"])
    monkeypatch.setattr(plan, "estimate_rank", lambda settings, reporter: memory)
    assert document["schema"] == "osora.train-plan/7"
    assert document["settings"]["loop"]["steps"] == 7
    assert document["parameters"] > 1000
    rank = document["memory"]
    assert rank["at_peak"]["weights"] == rank["at_peak"]["average"] >= 4 * document["parameters"]
    assert rank["peak_bytes"] == sum(rank["at_peak"].values())
    out = osora(*recipe, "--dry-run").out
    assert re.search(r"^parameters  [\d,]+$", out, re.MULTILINE)
    assert "target      vae\n" in out
    head, *rows = out.splitlines()[-6:]
    assert head.split() == ["memory", "MiB", "a", "rank"]
    assert [row.split()[0] for row in rows] == ["weights", "optimizer", "average", "activations", "peak"]
    assert "steps       4, 1 micro-batch each\n" in out
    assert f"output      {tmp_path / 'run'}: vae.safetensors\n" in out
    assert not (tmp_path / "run").exists()


@pytest.fixture
def _no_estimates(monkeypatch):
    """Leave out what takes seconds, and has tests of its own."""
    monkeypatch.setattr(plan, "estimate_rank", lambda settings, *, reporter: tiny_training.rank_memory())


def test_check_data_of_an_empty_table_loads_no_model(tmp_path, osora):
    table = tmp_path / "clips.csv"
    table.write_text("path,text,num_frames,height,width,aspect_ratio,resolution,fps\n")
    # There are no frozen parts, which training would miss.
    arguments = ["train", "--config", "demo_lora", "--set", f"data.table={table}", "--check-data"]
    assert "vae.safetensors" not in osora(*arguments, "--set", "weights=gone", code=3).err


@pytest.mark.usefixtures("_no_estimates")
@pytest.mark.parametrize("recipe_name", ["demo_lora", "stage1", "vae_hunyuan"])
def test_packaged_recipes_by_name(recipe_name, tmp_path, monkeypatch, osora):
    monkeypatch.chdir(tmp_path)
    missing = [
        line.split()[1]
        for line in osora("train", "--config", recipe_name, "--dry-run").out.splitlines()
        if line.startswith("missing")
    ]
    assert len(missing) == (3 if recipe_name == "stage1" else 0)


@pytest.mark.usefixtures("_no_estimates")
def test_dry_run_warns_of_a_cache_of_another_run(tmp_path, osora):
    folder = tmp_path / "cache"
    write_header(folder, {"fit": "other"}, EmptyPrompt(torch.zeros(2, 4), torch.zeros(3)))
    err = osora("train", "--config", "demo_lora", "--dry-run", "--set", f"train_mmdit.cache={folder}").err
    assert f"a run would be refused: {folder} was made for another run, which differs in: " in " ".join(err.split())


@pytest.mark.usefixtures("_no_estimates")
def test_interrupt_resume_and_overwrite(recipe, tmp_path, monkeypatch, capsys, osora):
    run = tmp_path / "run"
    interrupted_at(2, monkeypatch)
    assert main([*recipe, "--quiet"]) == 130
    expected = f"error: interrupted\n       step 3 of 4 is saved in {run}: continue with --resume\n"
    assert capsys.readouterr().err == expected
    assert not (run / "vae.safetensors").exists()

    refused = "continue it with --resume, replace it with --overwrite"
    assert refused in osora(*recipe, "--quiet", code=3).err
    planned = " ".join(osora(*recipe, "--dry-run").err.split())
    assert f"warning: a run would be refused: {run} holds an earlier run" in planned
    assert refused in planned
    with monkeypatch.context() as patched:
        patched.setattr(plan, "estimate_rank", lambda settings, reporter: tiny_training.rank_memory())
    assert f"resumed from {run / 'epoch0-global_step3'}" in osora(*recipe, "--dry-run", "--resume").out
    captured = osora(*recipe, "--quiet", "--resume", "--json")
    document = json.loads(captured.out)
    assert captured.err == ""
    assert (document["schema"], document["target"]) == ("osora.train/2", "vae")
    assert (document["steps"], document["resumed_from"]) == (4, 3)
    assert document["exports"] == [str(run / "vae.safetensors")]
    resumed = (run / "vae.safetensors").read_bytes()

    states = run / "epoch0-global_step4" / "running_states.json"
    states.write_text(json.dumps(json.loads(states.read_text()) | {"schema": "osora.running-states/1"}))
    assert "this version of osora reads 'osora.running-states/2'" in osora(*recipe, "--quiet", "--resume", code=3).err

    assert main([*recipe, "--overwrite"]) == 0
    assert (run / "vae.safetensors").read_bytes() == resumed
    captured = capsys.readouterr()
    assert captured.out == f"{run / 'vae.safetensors'}\n"
    lines = captured.err.splitlines()
    assert re.fullmatch(r"threads: \d+ \(.+\)", lines[0])
    assert re.fullmatch(r"vae: [\d,]+ parameters, steps 0 to 4", lines[1])
    assert [line.split()[:2] for line in lines[2:10:2]] == [["step", str(step)] for step in (1, 2, 3, 4)]
    assert all(line.startswith("  gradient norm ") for line in lines[3:10:2])
    assert max(map(len, lines[2:10])) <= 80
    assert lines[10].startswith("train: 4 steps, ")


def test_diverging(recipe, monkeypatch, capsys):
    real = VAETask.losses

    def diverging(self: VAETask, *args: Any) -> Any:
        for role, loss, figures in real(self, *args):
            yield role, loss * float("inf"), figures

    monkeypatch.setattr(VAETask, "losses", diverging)
    assert main([*recipe, "--set", "loop.steps=9"]) == 2
    err = capsys.readouterr().err
    assert "warning: step 1: loss or gradient is not finite, the step is skipped" in err
    assert "error: loss or gradient was not finite 5 steps in a row, up to step 5" in err
    assert "start again with --overwrite, and use a lower rate: --set optimizer.learning_rate=X" in err
