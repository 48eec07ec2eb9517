"""`osora train`: exit codes, what is printed where, and going on after Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_training
import yaml

from opensora_cli.cli.app import main
from opensora_cli.engine.train import plan
from opensora_cli.engine.train.objectives.vae import VAETask


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    """Arguments that train an autoencoder for four steps."""
    settings = tiny_training.vae_settings(tmp_path / "run").replace({"precision.compute": "fp32"})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    return ["train", "--config", str(tmp_path / "tiny.yaml")]


def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C at a step, once."""
    begin_step = VAETask.begin_step

    def begin(self: VAETask, at: int, ema: object) -> None:
        begin_step(self, at, ema)
        if at == step:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(VAETask, "begin_step", begin)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [["train", "--help"], ["train", "--config", "demo", "--set", "loop.stps=1"]], ids=" ".join
)
def test_help_and_wrong_requests_need_no_torch(args: list[str]) -> None:
    code = "import sys; from opensora_cli.cli.app import main; main(sys.argv[1:]);print('\\n', *sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "opensora_cli.cli.train" in modules
    assert modules & {"torch", "transformers", "numpy", "safetensors", "tokenizers"} == set()


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    named = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {"--config", "--from", "--set", "--overwrite", "--json", "--quiet", "--dry-run", "--check-data"} <= named
    assert {"--resume", "--resume-from", "--allow-older", "--device", "--gpus", "--devices", "--attention"} <= named
    assert {"--threads", "--new", "--list"} <= named


def test_dry_run_touches_nothing(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Estimates take longer for Muon, and for pictures first.
    plain = ["--set", "optimizer.name=adamw", "--set", "train_vae.picture_steps=0"]
    assert main([*recipe, "--dry-run", "--json", "--set", "loop.steps=7", *plain]) == 0
    document = json.loads(capsys.readouterr().out)
    # It takes seconds, and would find the same.
    memory = tuple(map(plan.RankMemory.model_validate, document["memory"]))
    monkeypatch.setattr(plan, "estimate_ranks", lambda settings, reporter: memory)
    assert document["schema"] == "osora.train-plan/2"
    assert (document["steps"], document["settings"]["loop"]["steps"]) == (7, 7)
    assert document["parameters"] > 1000
    [rank] = document["memory"]
    assert rank["weights_bytes"] == rank["ema_bytes"] >= 4 * document["parameters"]
    assert rank["peak_bytes"] > rank["weights_bytes"] + rank["ema_bytes"] + rank["moments_bytes"]
    assert main([*recipe, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^parameters  [\d,]+$", out, re.MULTILINE)
    assert "target      vae\n" in out
    head, row = out.splitlines()[-2:]
    assert head.split()[3:] == ["weights", "gradients", "moments", "EMA", "frozen", "activations", "buffers", "peak"]
    assert row.split()[:2] == ["rank", "0"]
    assert "steps       4, 2 clips each\n" in out
    assert f"output      {tmp_path / 'run'}: vae.safetensors\n" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (
            ["--attention", "cudnn"],
            4,
            "attention=cudnn does not work here: cudnn runs on CUDA devices only",
        ),
        (["--attention", "cudnn", "--set", "precision.compute=fp32"], 2, "computes in float16 and bfloat16 only"),
        (
            ["--gpus", "2", "--set", "strategy=hybrid", "--set", "parallel.ring_degree=2"],
            2,
            "bf16_products returns no log-sum-exp, and parallel.ring_degree=2 merges parts with it",
        ),
    ],
)
def test_attention_that_cannot_be_is_refused(tmp_path, capsys, args: list[str], code: int, told: str) -> None:
    demo = ["train", "--config", "demo_short", "--dry-run", "--device", "cpu", "--set", f"output={tmp_path}"]
    assert main([*demo, *args]) == code
    assert told in capsys.readouterr().err


@pytest.fixture
def _no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes seconds, and has tests of its own."""
    monkeypatch.setattr(plan, "estimate_ranks", lambda settings, *, reporter: ())


@pytest.mark.usefixtures("_no_estimates")
def test_dry_run_shows_what_is_held_for_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = (f"output={tmp_path}", "memory.checkpointing=true", "memory.activation_offload=all")
    demo = ["train", "--config", "demo_short", "--dry-run", *(word for each in chosen for word in ("--set", each))]
    assert main([*demo, "--set", "memory.activation_buffer=512MB"]) == 0
    words = "checkpoints in 2 double_blocks and 8 single_blocks, their inputs on the host, buffer 512.0 MB"
    out = capsys.readouterr().out
    assert f"\nmemory      {words}\n" in out
    assert "\nattention   bf16_products (as set)\n" in out
    assert main([*demo, "--set", "memory.activation_buffer=1MB"]) == 2
    assert "memory.activation_buffer=1000000 is too small for a step" in capsys.readouterr().err


def test_check_data(recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*recipe, "--check-data", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "osora.data-check/2"
    assert not (tmp_path / "run").exists()


def test_check_data_of_an_empty_table_loads_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "clips.csv"
    table.write_text("path,text,num_frames,height,width,aspect_ratio,resolution,fps\n")
    # There are no frozen parts, which training would miss.
    arguments = ["train", "--config", "demo_lora", "--set", f"data.table={table}", "--check-data"]
    assert main([*arguments, "--set", "weights=gone"]) == 3
    assert "vae.safetensors" not in capsys.readouterr().err


@pytest.mark.usefixtures("_no_estimates")
def test_variables_of_generate_do_no_harm(
    recipe: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OSORA_SAMPLING__SEED", "7")
    assert main([*recipe, "--dry-run"]) == 0
    assert "target      vae\n" in capsys.readouterr().out
    monkeypatch.setenv("OSORA_SAMPLING__SEAD", "7")
    assert main([*recipe, "--dry-run"]) == 2
    assert "OSORA_SAMPLING__SEAD in the environment is not a setting" in capsys.readouterr().err


@pytest.mark.usefixtures("_no_estimates")
@pytest.mark.parametrize("recipe_name", ["demo_short", "demo_text", "demo_vae"])
def test_packaged_recipes_by_name(
    recipe_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", recipe_name, "--dry-run"]) == 0
    missing = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("missing")]
    assert missing == (["vae.safetensors", "t5", "clip"] if recipe_name == "demo_short" else [])


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "--config is missing"),
        ([], 2, "--config demo_vae or"),
        (["--config", "demo_vea"], 2, "did you mean demo_vae?"),
        (["--config", "gone.yaml"], 3, "gone.yaml does not exist"),
        (["--config", "demo_vae", "--set", "loop.stps=1"], 2, "did you mean loop.steps?"),
        (["--config", "demo_vae", "--set", "optimiser.name=muon"], 2, "did you mean optimizer.name?"),
        (["--config", "demo_vae", "--set", "optimizer.name=moon"], 2, "did you mean muon?"),
        (["--config", "demo_vae", "--set", "loop.steps=many"], 2, "loop.steps=many must be a whole number (from"),
        (["--config", "demo_vae", "--resum"], 2, "Did you mean --resume?"),
        (["--config", "demo_vae", "--resume"], 3, "has no checkpoint to resume from"),
        (["--config", "demo_vae", "--resume", "--overwrite"], 2, "give one of them"),
        (["--config", "demo_vae", "--resume-from", "gone"], 3, "gone is no folder of a checkpoint"),
        (["--config", "demo_vae", "--allow-older"], 2, "--allow-older has no effect without --resume"),
        (["--config", "demo_vae", "--resume-from", "a", "--allow-older"], 2, "has no effect with --resume-from"),
        (["--config", "demo_vae", "--check-data", "--overwrite"], 2, "--overwrite has no effect with --check-data"),
        (["--config", "demo_vae", "--check-data", "--dry-run"], 2, "--dry-run has no effect with --check-data"),
        (["--new", "clips", "--allow-older"], 2, "--allow-older has no effect with --new"),
        (["--list", "--resume"], 2, "--resume has no effect with --list"),
        (["--list", "--allow-older"], 2, "--allow-older has no effect with --list"),
        (["--list", "--new", "clips"], 2, "--new has no effect with --list"),
        (["--list", "--config", "demo_vae"], 2, "--config has no effect with --list"),
        (["--list", "--gpus", "2"], 2, "--gpus has no effect with --list"),
        (["--from", "gone.json"], 3, "gone.json does not exist"),
        (["--config", "demo_vae", "--set", "init=gone.pt"], 3, "init=gone.pt does not exist"),
        (["--config", "demo_vae", "--gpus", "2", "--set", "device=cuda:0"], 2, "device=cuda:0 is one GPU"),
        (["--config", "demo_vae", "--device", "cpu", "--set", "device=cuda"], 2, "contradicts --device"),
        (["--config", "demo_short"], 3, "has no vae.safetensors, t5, clip"),
        (["--config", "demo_vae", "--set", "output=file/run"], 3, "cannot write in file/run"),
    ],
)  # fmt: skip
def test_bad_requests(
    args: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["train", *args]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("_no_estimates")
def test_interrupt_resume_and_overwrite(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    interrupted_at(2, monkeypatch)
    assert main([*recipe, "--quiet"]) == 130
    expected = f"error: interrupted\n       step 3 of 4 is saved in {run}: continue with --resume\n"
    assert capsys.readouterr().err == expected
    assert not (run / "vae.safetensors").exists()

    assert main([*recipe, "--quiet"]) == 3
    assert "continue it with --resume, replace it with --overwrite" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(plan, "estimate_ranks", lambda settings, reporter: ())
        assert main([*recipe, "--dry-run", "--resume"]) == 0
    assert f"resumed from {run / 'epoch0-global_step3'}" in capsys.readouterr().out
    if sys.platform != "win32":  # Windows has no flock
        (tmp_path / "kept").write_bytes(b"kept\n" * 20)
        (run / ".lock").symlink_to(tmp_path / "kept")
        assert main([*recipe, "--quiet", "--resume"]) == 3
        assert capsys.readouterr().err.startswith(f"error: cannot write the lock file {run / '.lock'}: it is a link\n")
        assert (tmp_path / "kept").read_bytes() == b"kept\n" * 20
        (run / ".lock").unlink()
    assert main([*recipe, "--quiet", "--resume", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert (document["schema"], document["target"]) == ("osora.train/2", "vae")
    assert (document["steps"], document["resumed_from"]) == (4, 3)
    assert document["exports"] == [str(run / "vae.safetensors")]
    resumed = (run / "vae.safetensors").read_bytes()

    assert main([*recipe, "--overwrite"]) == 0
    assert (run / "vae.safetensors").read_bytes() == resumed
    captured = capsys.readouterr()
    assert captured.out == f"{run / 'vae.safetensors'}\n"
    lines = captured.err.splitlines()
    assert re.fullmatch(r"threads: \d+ \(.+\)", lines[0])
    assert re.fullmatch(r"vae: [\d,]+ parameters, steps 0 to 4", lines[1])
    assert [line.split()[:2] for line in lines[2:6]] == [["step", str(step)] for step in (1, 2, 3, 4)]
    assert lines[6].startswith("train: 4 steps, ")


def test_diverging(recipe: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = VAETask.loss

    def diverging(self: VAETask, *args: Any) -> Any:
        loss, figures = real(self, *args)
        return loss * float("inf"), figures

    monkeypatch.setattr(VAETask, "loss", diverging)
    assert main([*recipe, "--set", "loop.steps=9"]) == 2
    err = capsys.readouterr().err
    assert "warning: step 1: loss or gradient is not finite, the step is skipped" in err
    assert "error: loss or gradient was not finite 5 steps in a row, up to step 5" in err
    assert "start again with --overwrite, and use a lower rate: --set optimizer.learning_rate=X" in err
