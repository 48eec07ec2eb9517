"""`osora generate` from the command line to the file: exit codes, what goes where, and Ctrl-C."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_adapters import factors, write_adapter
from tiny_world import World, released_overrides

from opensora_cli.cli import app
from opensora_cli.engine.generate import denoise as denoising
from opensora_cli.media.read import read_video

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OSORA_"):
            monkeypatch.delenv(name)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def arguments(world: World, out: Path, *more: str) -> list[str]:
    settings = released_overrides(world, out)
    weights, path = settings.pop("runtime.weights"), settings.pop("output.path")
    if "--steps" in more:
        del settings["sampling.num_inference_steps"]
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["generate", "--model", "open-sora-v2", "--weights", weights, "--out", path, *assignments, *more]


def again_with(world: World, sidecar: str, *more: str | Path) -> int:
    return app.main(["generate", "--from", sidecar, "--weights", str(world.released), *map(str, more)])


def started(command: list[str]) -> subprocess.Popen[str]:
    program = "import sys; from opensora_cli.cli.app import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", program, *command],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def osora(world, out, capsys):
    """Run a shrunken `osora generate`; returns exit code, stdout and stderr."""

    def run(*more: str) -> tuple[int, str, str]:
        code = app.main(arguments(world, out, *more))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_prompts_of_a_file_are_made_and_failed_rows_end_with_5(osora, out, tmp_path):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text('prompt,seed,name\n"raining, sea",3,\ndesert,x,dunes\n')
    code, stdout, stderr = osora("--prompts", str(prompts))
    assert stderr.index("warning: row 2: sampling.seed=x") < stderr.index("error: 1 of 2 rows failed")
    assert (code, stdout) == (5, f"{out / 'raining-sea_seed3.mp4'}\n")
    assert "error: 1 of 2 rows failed\nerror: row 2: sampling.seed=x must be a whole number" in stderr
    assert f"saved {out / 'raining-sea_seed3.mp4'} (" in stderr
    assert "--json lists all, and the same command tries these again" in stderr
    prompts.write_text('prompt,seed\n"raining, sea",3\n')
    code, stdout, _ = osora("--prompts", str(prompts), "--json")
    document = json.loads(stdout)
    assert (code, document["schema"], document["made"], document["kept"]) == (0, "osora.batch/3", 0, 1)
    code, stdout, _ = osora("--prompts", str(prompts), "--dry-run")
    lines = stdout.splitlines()
    assert (code, lines[0].split(":")[0]) == (0, "Fits")
    assert {"rows      1 of 1 shape, and 0 that would be refused", "rows      1"} <= set(lines)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_two_processes_at_once_make_every_prompt_of_a_file_once(world, out, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("sea\nriver\ndesert\nforest\n")
    runs = [started(arguments(world, out, "--prompts", str(prompts), "--json")) for _ in range(2)]
    printed = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    documents = [json.loads(stdout) for stdout, _ in printed]
    assert sum(document["made"] for document in documents) == 4
    assert sum(document["kept"] for document in documents) == 4
    names = {f"{name}_seed42.mp4" for name in ("sea", "river", "desert", "forest")}
    assert {path.name for path in out.glob("*.mp4")} == names
    assert all({Path(path).name for path in document["outputs"]} == names for document in documents)


@pytest.mark.usefixtures("every_stage_takes_time")
def test_a_video_is_written_and_its_path_printed(osora, out):
    code, stdout, stderr = osora("raining, sea", "--seed", "3", "--threads", "3", "--verbose")
    assert code == 0
    assert "threads: 3 (as set)\n" in stderr
    sidecar = json.loads((out / "raining-sea_seed3.mp4.json").read_text())
    assert sidecar["threads"] == {"count": 3, "reason": "as set"}
    # Where --from finds it.
    assert sidecar["settings"]["runtime"]["threads"] == 3
    assert torch.get_num_threads() == 1
    assert stdout == f"{out}/raining-sea_seed3.mp4\n"
    assert len(read_video(out / "raining-sea_seed3.mp4").frames_THWC) == 9
    for stage in ("load", "text", "denoise", "decode", "save"):
        assert f"{stage}: " in stderr
    code, _, stderr = osora("raining, sea", "--seed", "4")
    assert code == 0
    assert re.fullmatch(rf"saved {out}/raining-sea_seed4.mp4 \(\d+\.\d s\)\n", stderr)


def test_json_goes_back_in(world, osora, out, tmp_path, capsys):
    code, stdout, _ = osora("raining, sea", "--json", "--num-samples", "2")
    document = json.loads(stdout)
    assert code == 0
    assert document["schema"] == "osora.generate/3"
    assert [Path(output["path"]).name for output in document["outputs"]] == [
        "raining-sea_seed42.mp4",
        "raining-sea_seed43.mp4",
    ]
    sidecar = document["outputs"][1]["sidecar"]
    assert app.main(["show", str(out / "raining-sea_seed43.mp4"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["prompt"], shown["seed"]) == ("result", "raining, sea", 43)
    assert shown["timings_s"].keys() == document["timings_s"].keys()
    chosen = {"backend": "sdpa", "reason": "auto: torch's fused kernels; the others need a GPU"}
    assert document["attention"] == json.loads(Path(sidecar).read_text())["attention"] == chosen
    assert again_with(world, sidecar.removesuffix(".json"), "--out", tmp_path / "again") == 0
    capsys.readouterr()
    again = tmp_path / "again" / "raining-sea_seed43.mp4"
    assert again.read_bytes() == (out / "raining-sea_seed43.mp4").read_bytes()


def test_adapters_are_listed_used_and_used_again(world, osora, out, tmp_path):
    adapter = write_adapter(tmp_path / "style", factors("double_blocks.0.img_attn.proj", 32, 32))
    code, stdout, _ = osora("raining, sea", "--lora", f"{adapter}:0.5", "--dry-run")
    assert code == 0
    assert f"lora      {adapter} x 0.5: rank 2 in 1 layers" in stdout
    assert osora("raining, sea", "--lora", f"{adapter}:0.5")[0] == 0
    [video] = out.glob("*.mp4")
    again = tmp_path / "again.mp4"
    assert again_with(world, f"{video}.json", "--lora", f"{adapter}:0.5", "--out", again) == 0
    assert again.read_bytes() == video.read_bytes()


def test_a_clip_is_continued(osora, world, out, capsys):
    words = arguments(world, out, "a boat", "--continue", str(world.video))
    assert app.main([word.replace("num_frames=9", "num_frames=37") for word in words]) == 0
    stdout = capsys.readouterr().out
    video = json.loads(Path(f"{stdout.strip()}.json").read_text())
    assert video["settings"]["condition"]["continued"] > 0
    assert len(read_video(stdout.strip()).frames_THWC) == video["num_frames"]
    assert osora("a boat", "--continue", str(world.video), "--fps", "12")[0] == 2
    assert osora("a boat", "--continue", str(world.picture))[0] == 3


def test_the_steps_of_a_first_session_follow_one_another(world, osora, out, capsys):
    """Make it, look at what it takes, and make it again: in one folder, each command ends with 0."""
    video = f"{out}/raining-sea_seed42.mp4"
    assert osora("raining, sea")[:2] == (0, f"{video}\n")
    code, plan, _ = osora("raining, sea", "--dry-run")
    assert (code, f"keeps     {video}, {Path(video).name}.json" in plan) == (0, True)
    assert osora("raining, sea", "--memory-limit", "16GiB", "--dry-run")[0] == 0
    code, stdout, stderr = osora("raining, sea")
    assert (code, stdout) == (0, f"{video}\n")
    assert "made before by the same request" in stderr
    assert again_with(world, f"{video}.json", "--out", out, "--quiet") == 0
    assert capsys.readouterr().out == f"{video}\n"
    assert again_with(world, f"{video}.json", "--out", out, "--seed", "7", "--quiet", "--json") == 0
    [made] = json.loads(capsys.readouterr().out)["outputs"]
    assert (Path(made["path"]).name, made["made_before"]) == ("raining-sea_seed7.mp4", False)
    assert len(list(out.iterdir())) == 4


def test_a_file_from_elsewhere_describes_a_video_and_nothing_else(world, osora, out, tmp_path, monkeypatch, capsys):
    """Neither where it is written and what it replaces, nor servers, weights, devices and caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSORA_REFINE_URL", "http://127.0.0.1:9/v1")
    assert osora("raining, sea", "--ref", str(world.picture))[0] == 0
    [video] = out.glob("*.mp4")
    mine = tmp_path / "mine.mp4"
    mine.write_bytes(b"mine")
    document = json.loads(Path(f"{video}.json").read_text())
    settings = document["settings"]
    settings["output"] |= {"path": str(mine), "overwrite": True}
    settings["refine"] = {"prompt": True, "motion_score": True}
    settings["runtime"] |= {"device": "cuda:5"}
    settings["memory"]["offload"] = "model"
    settings["parallel"] = {"gpus": 64}
    evil = tmp_path / "evil.json"
    evil.write_text(json.dumps(document))
    assert again_with(world, str(evil), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert mine.read_bytes() == b"mine"
    made = tmp_path / "samples" / video.name
    assert [output["path"] for output in result["outputs"]] == [str(made.relative_to(tmp_path))]
    assert made.read_bytes() == video.read_bytes()
    assert result["settings"]["memory"]["offload"] == "auto"
    # A file of another request is replaced on the command line alone.
    assert again_with(world, str(evil), "--seed", "7", "--out", mine) == 3
    assert mine.read_bytes() == b"mine"


def test_ctrl_c_while_denoising(world, osora, out, monkeypatch, capsys):
    denoise = denoising.denoise

    def interrupted(velocity, *args, on_step, **options):
        def stop(*reached):
            on_step(*reached)
            raise KeyboardInterrupt

        return denoise(velocity, *args, on_step=stop, **options)

    monkeypatch.setattr(denoising, "denoise", interrupted)
    code, stdout, stderr = osora("sea")
    state = out / "sea_seed42.latents.safetensors"
    assert app.main(["show", str(state), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["prompt"], shown["seed"]) == ("state", "sea", 42)
    assert (code, stdout) == (130, "")
    [command] = re.findall(r"continue with: osora (.*)", stderr)
    assert command == f"generate --from {state} --weights {world.released}"
    monkeypatch.setattr(denoising, "denoise", denoise)
    # --from finds out what the file is.
    assert app.main([*shlex.split(command), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outputs"][0]["path"] == str(out / "sea_seed42.mp4")
    assert document["model_evaluations"] == 2
    assert not state.exists()
