"""`osora generate --gpus`: what several processes make is what one makes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from acting_ranks import KILL, act_in_stage
from PIL import Image

import opensora_cli
from opensora_cli.cli.app import main
from opensora_cli.engine.launch.launcher import LaunchRequest

# Of one size with the clip there would be a single tile, which rank 0 decodes.
TILES = [
    word for key in ("sample_size=32", "temporal_tiling=true", "sample_tsize=16") for word in ("--set", f"vae.{key}")
]
PICTURE_GUIDED = ["--height", "48", "--width", "32", "--set", "sampling.image_guidance_scale=2"]
ONE_LATENT_FRAME = ["--set", "condition.video_latent_frames=1"]
SMALL = ["--height", "64", "--width", "64", "--num-frames", "5"]
SHORT = ["generate", "raining, sea", "--seed", "7", "--device", "cpu", *SMALL]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def frames(folder: str) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)).astype(int) for path in sorted(Path(folder).glob("*.png"))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "more", "devices", "counts"),
    [
        ([*TILES, "--height", "48", "--width", "32", "--num-frames", "17", "--steps", "1"], [], "Ulysses 2", {"": 17}),
        # Two samples, of which the branches of the video's guidance are shared, and the tokens of the picture.
        (
            ["--t2i2v", "--save-picture", "--steps", "2", "--num-samples", "2", *PICTURE_GUIDED],
            ["--set", "parallel.cfg_parallel_degree=2"],
            "branches of guidance 2",
            {"_000": 5, "_001": 5},
        ),
        (["--extend", "1", "--num-frames", "9", "--steps", "2", *ONE_LATENT_FRAME], [], "Ulysses 2", {"": 13}),
        (["--width", "144", "--height", "144", "--draft-res", "128px", "--steps", "3"], [], "Ulysses 2", {"": 5}),
    ],
    ids=["tiles", "picture first", "extended", "draft"],
)
def test_two_processes_make_what_one_makes(flags, more, devices, counts):
    short = [*SHORT, *flags, "--format", "png"]
    command = [sys.executable, "-m", "opensora_cli", *short, "--gpus", "2", *more, "--out", "two.png", "--json", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"devices: 2, {devices}" in done.stderr
    assert [output["path"] for output in json.loads(done.stdout)["outputs"]] == [f"two{ending}" for ending in counts]
    assert main([*short, "--out", "one.png"]) == 0
    for ending, count in counts.items():
        one, two = frames(f"one{ending}"), frames(f"two{ending}")
        assert len(one) == len(two) == count
        assert np.abs(one - two).max() <= 2
        assert "parallel" not in json.loads(Path(f"two{ending}.json").read_text())["settings"]
        if "--save-picture" in flags:
            first, second = (
                np.asarray(Image.open(f"{name}{ending}.picture.png")).astype(int) for name in ("one", "two")
            )
            assert np.abs(first - second).max() <= 1


@pytest.mark.slow
def test_two_processes_make_rows_of_their_own():
    Path("p.csv").write_text("prompt,seed,num_frames\nsea,1,1\ndesert,2,1\nsea,3,1\nsea,4,x\nsnow,5,1\n")
    rows = ["generate", "--prompts", "p.csv", "--device", "cpu", "--steps", "1", "--threads", "1"]
    command = [sys.executable, "-m", "opensora_cli", *rows, "--gpus", "2", "--json"]
    done = subprocess.run([*command, "--out", "two"], capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert "1 of 5 rows failed" in done.stderr
    document = json.loads(done.stdout)
    assert (document["rows"], document["made"], document["kept"]) == (5, 4, 0)
    assert [failed["row"] for failed in document["failed"]] == [4]
    assert [Path(path).name for path in document["outputs"]] == [
        "sea_seed1.png", "desert_seed2.png", "sea_seed3.png", "snow_seed5.png",
    ]  # fmt: skip
    assert main([*rows, "--out", "one"]) == 5
    for path in document["outputs"]:
        assert (Path("one") / Path(path).name).read_bytes() == Path(path).read_bytes()
    again = subprocess.run([*command, "--out", "two"], capture_output=True, text=True)
    assert json.loads(again.stdout)["kept"] == 4


def test_ranks_get_the_validated_settings_and_the_flags(monkeypatch):
    started = []

    def launch(request: LaunchRequest, command: list[str]) -> None:
        saved = json.loads(Path(command[2]).read_text())
        started.append((request.gpus, request.device_type, command, saved["settings"]))

    monkeypatch.setattr("opensora_cli.engine.generate.ranks.launch", launch)
    assert main([*SHORT, "--gpus", "2", "--steps", "3", "--offload", "blocks", "--json"]) == 0
    [(gpus, kind, command, settings)] = started
    assert (gpus, kind) == (2, "cpu")
    assert [*command[:2], command[-1]] == ["generate", "--from", "--json"]
    assert settings["memory"]["offload"] == "blocks"
    assert (settings["prompt"], settings["sampling"]["num_inference_steps"]) == ("raining, sea", 3)


def test_a_result_that_exists_starts_no_ranks(capsys, monkeypatch):
    one = [*SHORT, "--steps", "1", "--out", "a.png", "--num-frames", "1", "--quiet"]
    assert main(one) == 0
    monkeypatch.setattr(
        "opensora_cli.engine.generate.run.start_ranks", lambda *_, **__: pytest.fail("ranks are started")
    )
    assert main([*one, "--gpus", "2"]) == 0
    assert capsys.readouterr().out == "a.png\n" * 2
    Path("b.mp4").touch()
    assert main([*SHORT, "--gpus", "2", "--out", "b.mp4"]) == 3
    assert "b.mp4 exists already" in capsys.readouterr().err


class TestRanksThatOthersStart:
    @pytest.mark.slow
    def test_slurm(self):
        outs, errs, codes = self.slurm("--steps", "2", "--format", "png", "--out", "two.png", "-v")
        assert codes == [0, 0], errs
        assert outs == ["two\n", ""]
        assert "devices: 2, Ulysses 2" in errs[0]
        assert main([*SHORT, "--steps", "2", "--format", "png", "--out", "one.png"]) == 0
        assert np.abs(frames("one") - frames("two")).max() <= 1

    @pytest.mark.slow
    def test_one_killed_under_slurm(self):
        """No launcher watches them: the other finds its connection closed, and says where it was."""
        act_in_stage(Path.cwd(), rank=1, stage="denoise", act=KILL)
        path = os.pathsep.join([str(Path.cwd()), str(Path(opensora_cli.__file__).parent.parent)])
        _, errs, codes = self.slurm("--steps", "2", "--out", "a.mp4", PYTHONPATH=path)
        assert codes == [4, -signal.SIGKILL], errs
        assert f"error: rank 0 on {socket.gethostname()}, in the stage denoise: lost the others" in errs[0]
        assert "Traceback" not in errs[0]

    @staticmethod
    def slurm(*flags: str, **environment: str) -> tuple[list[str], list[str], list[int]]:
        """Return what two ranks that srun would have started print on stdout and stderr, and their exit codes."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "localhost", "MASTER_PORT": port}
        step |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "opensora_cli", *SHORT, *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | step | environment | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=300) for rank in ranks]
        return [out for out, _ in said], [err for _, err in said], [rank.returncode for rank in ranks]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_plans_for_gpus_that_are_not_here(capsys, monkeypatch):
    command = ["generate", "raining, sea", "--gpus", "2", "--num-frames", "1", "--dry-run"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "warning: this machine could not run it: gpus=2, and this machine has no usable NVIDIA GPU" in err
    assert "planned on CUDA GPUs, whose free memory is not known" in err
    assert "on cuda (cuda), bfloat16" in out
    assert out.startswith("Unknown: ")
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["device"], document["free_bytes"], document["budget_bytes"], document["fits"]) == (
        "cuda",
        *3 * [None],
    )
    assert document["jobs"][0]["mesh"]["ulysses"] == 2
    # A limit of memory is known. What would fit takes seconds, and has tests of its own.
    monkeypatch.setattr("opensora_cli.engine.generate.chain._smaller_requests", lambda plan: ())
    assert main([*command, "--memory-limit", "1MiB"]) == 4
    assert "memory.limit allows 1.00 MiB" in capsys.readouterr().err


def test_ranks_that_were_started_are_as_many_as_asked_for(monkeypatch, capsys):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*SHORT, "--gpus", "3"]) == 2
    assert "3 devices are asked for, and 2 ranks were started" in capsys.readouterr().err
