"""Generations by real ranks that end early in each stage: what is said, what is kept, and that nothing else is left."""

import os
import re
import shlex
import shutil
import socket
from pathlib import Path

import psutil
import pytest
from acting_ranks import HANG, KILL, STOP, act_in_stage
from PIL import Image

import opensora_cli
from opensora_cli.cli.app import main
from opensora_cli.media.read import read_video

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_ranks_around")]

# Less than the 600 s after which a collective without its peers would give up by itself.
LIMIT_S = 240.0
SAMPLES = 3
# Of one size with the clip there would be a single tile, which rank 0 decodes.
TILES = [
    word for key in ("sample_size=32", "temporal_tiling=true", "sample_tsize=16") for word in ("--set", f"vae.{key}")
]

KEEPING = ("decode", "save")

# What a rank does, the exit code, and what is said of it. One that asks its launcher to end waits for that.
EVENTS = {
    "killed": (KILL, 4, r"killed \(SIGKILL\)"),
    "stopped": (STOP, 4, r"stopped \(SIGSTOP\), no sign of life for \d+ s"),
    "hung": (HANG, 4, r"no progress for \d+ s"),
    "interrupted": (f"os.kill(os.getppid(), signal.SIGINT); {HANG}", 130, None),
    "terminated": (f"os.kill(os.getppid(), signal.SIGTERM); {HANG}", 130, None),
}
# Every stage and every event, and each event before and after there is something to keep. Rank 0 alone encodes
# references and saves. While it saves it is alone, waits for no other, and a disk may take as long as it takes.
CASES = [
    ("load", 1, "killed"),
    # The other rank may still be starting, and rank 0 reports what is finished.
    ("load", 0, "terminated"),
    ("text", 1, "hung"),
    ("text", 1, "stopped"),
    ("encode", 0, "interrupted"),
    ("encode", 0, "killed"),
    ("denoise", 1, "killed"),
    ("denoise", 1, "hung"),
    ("denoise", 1, "interrupted"),
    # The rank that has kept something, and the other.
    ("decode", 0, "killed"),
    ("decode", 1, "stopped"),
    ("decode", 1, "terminated"),
    ("save", 0, "killed"),
    ("save", 0, "interrupted"),
]


def command(picture: Path, out: Path, *more: str) -> list[str]:
    small = ["--height", "64", "--width", "64", "--num-frames", "17", "--steps", "2"]
    short = ["generate", "raining, sea", "--seed", "7", *small, "--ref", str(picture)]
    return [*short, *TILES, "--device", "cpu", "--gpus", "2", "--out", str(out), *more]


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "a.png"
    Image.new("RGB", (64, 64)).save(path)
    return path


@pytest.fixture(scope="module")
def whole(picture, tmp_path_factory):
    """The results of a run that nothing ends, by their names."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(opensora_cli.__file__).parents[1]))
        assert main(command(picture, out, "--num-samples", str(SAMPLES))) == 0
    return videos(out)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture
def acting(tmp_path, monkeypatch):
    """`acting(rank=1, stage="load", act=KILL)` for all ranks that are started then."""
    path = tmp_path / "acting"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr("opensora_cli.engine.launch.process.SILENCE_S", 3.0)  # after which a rank counts as hung
    yield lambda **named: act_in_stage(path, **named)
    shutil.rmtree(path)


def videos(out):
    return {path.name: path.read_bytes() for path in out.glob("*.mp4")}


def files(folder):
    # Torch makes a folder for what it compiles.
    return sorted(path.name for path in folder.rglob("*") if not path.name.startswith("torchinductor_"))


def ranks_of(folder):
    found = []
    for process in psutil.process_iter():
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            environment = process.environ()
            if is_alive and "RANK" in environment and str(folder) in environment.get("PYTHONPATH", ""):
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("stage", "rank", "event"), CASES)
def test_in_each_stage(stage, rank, event, tmp_path, picture, whole, processes, temporary, acting):
    act, code, cause = EVENTS[event]
    acting(rank=rank, stage=stage, act=act)
    out, shared = tmp_path / "my out", set(Path("/dev/shm").glob("osora*"))
    ended = processes.osora(tmp_path, command(picture, out)).end(LIMIT_S)

    assert ended[:2] == (code, ""), ended
    err = ended[2]
    [message] = re.findall(r"^error: (.*)", err, re.MULTILINE)
    if cause is None:
        assert message == "interrupted"
        assert files(temporary) == []
    else:
        assert re.fullmatch(f"rank {rank} on {socket.gethostname()}, in the stage {stage}: {cause}.*", message), err
        [log] = map(Path, re.findall(r"^ +log: (.*)", err, re.MULTILINE))
        assert log.name == f"rank{rank}.log"
        assert event != "hung" or "sitecustomize.py" in log.read_text()  # where it hangs
        assert files(temporary) == sorted([log.parent.name, "rank0.log", "rank1.log", "settings.json"])
    assert "Traceback" not in err
    assert ranks_of(tmp_path) == []
    assert set(Path("/dev/shm").glob("osora*")) <= shared

    latents = out / "raining-sea_seed7.latents.safetensors"
    advice = re.findall(r"continue with: osora (.*)", err)
    flags = ["--device", "cpu", "--gpus", "2"]
    if stage not in KEEPING:
        assert (advice, files(out)) == ([], [])
        assert cause is not None or "nothing was finished yet: run it again" in err
        return
    assert "nothing was finished" not in err
    assert [shlex.split(line) for line in advice] == [["generate", "--from", str(latents), *flags]]
    assert files(out) == [latents.name]
    acting(rank=0, stage="none", act=KILL)
    assert main(shlex.split(advice[0])) == 0
    assert videos(out) == {name: whole[name] for name in ("raining-sea_seed7.mp4",)}


def test_the_same_command_goes_on(tmp_path, picture, whole, processes, temporary, acting):
    """With a finished sample, and two whose latents are saved."""
    # A sign of life when saving begins, and one when it ends.
    acting(rank=0, stage="save", act=EVENTS["interrupted"][0], nth=3)
    out = tmp_path / "out"
    samples = command(picture, out, "--num-samples", str(SAMPLES))
    code, _, err = processes.osora(tmp_path, samples).end(LIMIT_S)
    assert code == 130, err
    name = "raining-sea_seed{}".format
    saved = [f"{name(seed)}.latents.safetensors" for seed in (8, 9)]
    assert files(out) == sorted([f"{name(7)}.mp4", f"{name(7)}.mp4.json", *saved])
    assert f"finished: {out / name(7)}.mp4\n" in err

    acting(rank=0, stage="none", act=KILL)
    code, printed, err = processes.osora(tmp_path, samples).end(LIMIT_S)
    assert code == 0, err
    assert printed.splitlines() == [f"{out / name(seed)}.mp4" for seed in (7, 8, 9)]
    assert f"made before by the same request: {out / name(7)}.mp4\n" in err
    assert [line for line in err.splitlines() if "continuing from" in line] == [
        f"continuing from latents of the same request: {out / each}" for each in saved
    ]
    assert "denoise" not in err
    assert videos(out) == whole
    assert files(out) == sorted(name(seed) + end for seed in (7, 8, 9) for end in (".mp4", ".mp4.json"))


@pytest.mark.parametrize("ranks", [2, 1])
def test_what_is_stopped_in_the_middle_of_denoising_goes_on(ranks, tmp_path, processes, temporary, acting):
    """On as many ranks to the same bytes, and on one within rounding."""
    out = tmp_path / "out"
    short = ["generate", "raining, sea", "--num-frames", "9", "--steps", "4", "--device", "cpu", "--threads", "1"]
    whole = tmp_path / "whole.mp4"
    assert processes.osora(tmp_path, [*short, "--gpus", "2", "--out", str(whole)]).end(LIMIT_S)[0] == 0
    # A sign of life when the stage begins, and one for each evaluation: two a step.
    acting(rank=0, stage="denoise", act=EVENTS["interrupted"][0], nth=6)
    code, _, err = processes.osora(tmp_path, [*short, "--gpus", "2", "--out", str(out)]).end(LIMIT_S)
    assert code == 130, err
    [state] = out.iterdir()
    assert f"continue with: osora generate --from {state} --device cpu --gpus 2\n" in err

    (tmp_path / "acting" / "sitecustomize.py").unlink()
    resumed = ["generate", "--from", str(state), "--device", "cpu", "--gpus", str(ranks)]
    code, printed, err = processes.osora(tmp_path, resumed).end(LIMIT_S)
    assert code == 0, err
    assert f"{state}, after step 2\n" in err
    video = Path(printed.strip())
    if ranks == 2:
        assert video.read_bytes() == whole.read_bytes()
    made, expected = (read_video(path).frames_THWC.float() for path in (video, whole))
    assert (made - expected).square().mean() < 1
    assert files(out) == [video.name, f"{video.name}.json"]
