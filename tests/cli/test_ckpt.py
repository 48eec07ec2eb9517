"""`osora ckpt`: exit codes, what is printed where, and what a bad file or a bad request leads to."""

import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from fake_hub import FakeHub, FakeRepo, connect, serving
from safetensors.torch import load_file, save_file

from opensora_cli.checkpoint import stream
from opensora_cli.cli.app import main
from opensora_cli.settings.load import load_preset

ROOT = Path(__file__).parents[2]
HEX = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has these files in its working directory."""
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}, "good.safetensors")
    content = Path("good.safetensors").read_bytes()
    Path("truncated.safetensors").write_bytes(content[:-3])
    Path("empty.pt").touch()
    Path("noise.bin").write_bytes(bytes(range(256)) * 4)
    torch.save({"weight": torch.ones(2), "evil": _Payload()}, "evil.pt")
    Path("evil-old.pt").write_bytes(pickle.dumps(_Payload()))
    Path("folder").mkdir()
    Path("file").touch()


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["ckpt", *args])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        # Requests that make no sense.
        (["convert", "good.safetensors"], 2, "Missing argument 'DST'"),
        (["convrt", "a", "b"], 2, "Did you mean 'convert'?"),
        (["convert", "good.safetensors", "x", "--qkv", "fuse"], 2, "'fuse' is not one of 'fused', 'split'"),
        (["convert", "good.safetensors", "x", "--shard-size", "4XB"], 2, "size such as 4GB or 4096MiB (from"),
        (["convert", "good.safetensors", "x.ckpt"], 2, ".ckpt, that names no format: add --format"),
        (["merge-lora", "good.safetensors", "folder", "x.ckpt"], 2, ".ckpt, that names no format"),
        (["convert", "good.safetensors", "x.pt", "--shard-size", "4GB"], 2, "has no effect on format=torch"),
        (["convert", "good.safetensors", "x.pt", "--format", "dcp"], 2, "must agree with the ending"),
        (["convert", "good.safetensors", "good.safetensors", "--overwrite"], 2, "is what is read"),
        (["convert", "good.safetensors", "x", "--select", "ema"], 2, "has no ema weights"),
        (["convert", "good.safetensors", "x", "--only", "b.*"], 2, "matches no tensor"),
        (["convert", "good.safetensors", "x", "--rename", "a"], 2, "must be OLD=NEW"),
        (["convert", "good.safetensors", "x", "--qkv", "split"], 2, "is for an MMDiT"),
        (["convert", "good.safetensors", "x", "--preset", "flux-dev"], 2, "did you mean flux1-dev?"),
        (["verify", "good.safetensors", "--preset", "flux-dev"], 2, "did you mean flux1-dev?"),
        (["verify", "good.safetensors", "--sha256", "12"], 2, "must be 64 hexadecimal digits"),
        (["diff", "good.safetensors", "good.safetensors", "--rtol", "-1"], 2, "must be at least 0 (from --rtol)"),
        (["download", "open-sora"], 2, "did you mean open-sora-v2?"),
        # Files that are missing or broken.
        (["inspect", "gone.pt"], 3, "gone.pt does not exist"),
        (["inspect", "folder"], 3, "folder"),
        (["inspect", "empty.pt"], 3, "empty.pt is empty"),
        (["inspect", "noise.bin"], 3, "noise.bin"),
        (["inspect", "truncated.safetensors"], 3, "truncated"),
        (["convert", "truncated.safetensors", "x"], 3, "truncated"),
        (["diff", "good.safetensors", "truncated.safetensors"], 3, "truncated"),
        (["convert", "evil.pt", "x"], 3, "evil.pt is refused: it imports"),
        (["inspect", "evil-old.pt"], 3, "evil-old.pt is a pickle, but not of torch.save"),
        (["merge-lora", "good.safetensors", "folder", "x"], 3, "adapter_config.json does not exist"),
        (["convert", "good.safetensors", "x", "--preset", "flux1-dev"], 3, "does not become flux1-dev: 1084 missing"),
        # Targets that cannot be written.
        (["convert", "good.safetensors", "file"], 3, "file is a file"),
        (["convert", "good.safetensors", "file", "--format", "torch"], 3, "exists already"),
        (["convert", "good.safetensors", "folder", "--format", "safetensors"], 3, "is a folder"),
        (["convert", "good.safetensors", "/dev/null", "--overwrite", "--format", "torch"], 3, "neither a file nor a"),
        (["convert", "good.safetensors", "file/x"], 3, "file is not a folder"),
        (["convert", "good.safetensors", "x" * 300], 3, "cannot write xxx"),
    ],
)  # fmt: skip
def test_refusals(args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = run(*args, "--quiet", capsys=capsys)
    assert found == code
    assert message in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 2  # the reason and a hint
    assert out == ""
    assert not Path("x").exists()
    assert not Path("executed").exists()


def test_names_of_tensors_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "evil\x1b[2J\nerror: a"
    save_file({name: torch.ones(1), "b": torch.ones(1)}, "evil.safetensors")
    for args in (["convert", "evil.safetensors", "x", "--rename", f"b={name}"], ["inspect", "evil.safetensors"]):
        _, out, err = run(*args, "--quiet", capsys=capsys)
        assert "\x1b" not in out + err
        assert "evil\\x1b[2J\\nerror: a" in out + err
        assert len(err.splitlines()) <= 1


@pytest.mark.usefixtures("every_stage_takes_time")
@pytest.mark.parametrize("command", [["ckpt", "convert"], ["convert-ckpt"]], ids=" ".join)
def test_both_names_of_convert(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "good.safetensors", "new.pt", "--dtype", "bf16"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "new.pt\n"
    assert torch.load("new.pt", weights_only=True)["a.bias"].dtype == torch.bfloat16
    lines = captured.err.splitlines()
    assert lines[:4] == [
        "source  good.safetensors (safetensors)",
        "target  new.pt (torch)",
        "size    2 tensors, 16 bytes",
        "changes dtype bf16",
    ]
    assert re.fullmatch(r"hash: \d+ bytes, [\d.]+ s", lines[4])
    assert re.fullmatch(r"write: 16 bytes, [\d.]+ s", lines[5])


def test_convert_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("convert", "good.safetensors", "new", "--json", "--quiet", "--no-hash", capsys=capsys)
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["schema"] == "osora.ckpt.convert/1"
    assert document["source_sha256"] is None
    assert sorted(document["files"]) == ["new/model-00001-of-00001.safetensors", "new/model.safetensors.index.json"]


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", "good.safetensors", "new", "--dry-run", capsys=capsys)
    assert (code, out.splitlines()[1]) == (0, "target  new (safetensors-shards)")
    assert not Path("new").exists()
    assert run("convert", "good.safetensors", "file", "--format", "torch", "--dry-run", capsys=capsys)[0] == 3


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("inspect", "good.safetensors", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [
        "a.bias    float32  [2]     8 bytes",
        "a.weight  float32  [2, 3]  24 bytes",
    ]
    code, out, _ = run("inspect", "good.safetensors", "--stats", "--json", "--only", "*.bias", capsys=capsys)
    assert json.loads(out)["tensors"][0]["statistics"]["mean"] == 1


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "good.safetensors", "--quiet", capsys=capsys)[0] == 0
    code, out, err = run("verify", "good.safetensors", "--sha256", HEX, "--preset", "flux1-dev", "-q", capsys=capsys)
    assert (code, err) == (3, "error: good.safetensors has 3 problems\n")
    assert [line.split()[0] for line in out.splitlines()] == ["problem"] * 3
    code, out, _ = run("verify", "truncated.safetensors", "--json", "-q", capsys=capsys)
    assert (code, json.loads(out)["sound"]) == (3, False)


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "good.safetensors", "half.pt", "--dtype", "fp16", "-q", capsys=capsys)[0] == 0
    code, out, err = run("diff", "good.safetensors", "half.pt", "-q", capsys=capsys)
    assert (code, err) == (3, "error: good.safetensors and half.pt differ\n")
    assert out.startswith("dtype   2 tensors are float32 and float16\n")
    code, out, err = run("diff", "good.safetensors", "half.pt", "--atol", "0.01", "--json", "-q", capsys=capsys)
    assert (code, err) == (0, "")
    assert json.loads(out)["equal"]


def test_merge_lora_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    Path("adapter").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
    Path("adapter", "adapter_config.json").write_text(json.dumps(config))
    factors = {"A": torch.tensor([[1.0, 0.0, -1.0]]), "B": torch.tensor([[3.0], [0.5]])}
    tensors = {f"base_model.model.a.lora_{name}.weight": factor for name, factor in factors.items()}
    save_file(tensors, "adapter/adapter_model.safetensors")

    code, out, err = run("merge-lora", "good.safetensors", "adapter", "new.safetensors", "-q", capsys=capsys)
    assert (code, out, err) == (0, "new.safetensors\n", "")
    assert load_file("new.safetensors")["a.weight"].tolist() == [[6, 1, -4], [4, 4, 4]]
    assert load_file("new.safetensors")["a.bias"].tolist() == [1, 1]
    code, out, _ = run(
        *("merge-lora", "new.safetensors", "adapter", "back.pt", "--unmerge", "--json", "-q"), capsys=capsys
    )
    document = json.loads(out)
    assert (code, document["schema"], document["error"]["tensor"]) == (0, "osora.ckpt.merge-lora/1", "a.weight")
    assert 0 < document["error"]["bound"] < 1e-5
    assert run("diff", "good.safetensors", "back.pt", "-q", capsys=capsys)[0] == 0
    args = ("new.safetensors", "adapter", "half.safetensors", "--scale", "-0.5", "-q")
    assert run("merge-lora", *args, capsys=capsys)[0] == 0
    assert load_file("half.safetensors")["a.weight"].tolist() == [[3, 1, -1], [3.5, 4, 4.5]]
    assert run("merge-lora", *args, capsys=capsys)[0] == 3


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stream, "_copy_run", full)
    for target in ("new.safetensors", "new"):
        code, _, err = run("convert", "good.safetensors", target, "-q", capsys=capsys)
        assert code == 3
        reason, hint = err.splitlines()
        assert reason == f"error: cannot write {target}: No space left on device"
        assert hint == "       make room there, or write to another disk"
        assert sorted(os.listdir()) == before


def test_a_target_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Root, whom tests may run as, may write everywhere.
    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = run("convert", "good.safetensors", "locked/new.safetensors", "-q", capsys=capsys)
    assert code == 3
    assert "cannot write in locked: Permission denied" in err


@pytest.mark.parametrize("target", ["new.safetensors", "new"])
def test_ctrl_c_leaves_nothing(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("old").mkdir()
    before = sorted(os.listdir())
    copy_run = stream._copy_run

    def interrupted(*args: object) -> None:
        copy_run(*args)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(stream, "_copy_run", interrupted)
    code, out, err = run("convert", "good.safetensors", target, "-q", capsys=capsys)
    assert (code, out, err) == (130, "", "error: interrupted\n")
    assert sorted(os.listdir()) == before


def start(*args: str, **variables: str) -> subprocess.Popen[str]:
    """Run `osora` in a process of its own, in the folder of the test."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "opensora_cli", *args]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ctrl_c_in_a_process() -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    with open("large.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**30)
    with start("ckpt", "convert", "large.safetensors", "small.safetensors", "--dtype", "bf16", "--no-hash") as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("changes"))  # what follows is the writing
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert line == "changes dtype bf16\n"
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    assert not [name for name in os.listdir() if name.startswith(("small", "."))]


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "convert": "format shard-size dtype qkv rotary rename select only drop preset no-hash overwrite dry-run json",
        "inspect": "stats only select json quiet",
        "verify": "preset sha256 no-data select json quiet",
        "diff": "rtol atol only select json quiet",
        "merge-lora": "unmerge scale format shard-size no-hash overwrite json quiet",
        "download": "to overwrite dry-run json quiet",
    }
    for command, options in expected.items():
        code, out, _ = run(command, "--help", capsys=capsys)
        assert code == 0
        assert {f"--{option}" for option in options.split()} <= set(re.findall(r"--[a-z0-9-]+", out))
    assert main(["ckpt"]) == 0
    assert "merge-lora" in capsys.readouterr().out


@pytest.mark.slow
def test_help_and_wrong_requests_need_no_torch() -> None:
    code = (
        "import sys; from opensora_cli.cli.app import main\n"
        "for args in ('--help', 'convert --help', 'convert a b --shard-size x'): main(['ckpt', *args.split()])\n"
        "print('\\n', *sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "opensora_cli.cli.ckpt" in modules
    assert modules & {"torch", "numpy", "safetensors", "huggingface_hub"} == set()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {"Open_Sora_v2.safetensors": b"weights", "hunyuan_vae.safetensors": b"vae"}
    files |= {f"{folder}/config.json": b"{}" for folder in ("google/t5-v1_1-xxl", "openai/clip-vit-large-patch14")}
    with serving() as server:
        server.repos["hpcai-tech/Open-Sora-v2"] = FakeRepo(files)
        yield server


def test_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    connect(hub, monkeypatch)
    code, out, _ = run("download", "open-sora-v2", "--dry-run", "--json", capsys=capsys)
    assert (code, json.loads(out)["schema"], hub.transfers) == (0, "osora.ckpt.download/1", [])
    code, out, err = run("download", "open-sora-v2", capsys=capsys)
    assert code == 0
    assert "hpcai-tech/Open-Sora-v2: licence apache-2.0" in err
    assert Path("ckpts/Open_Sora_v2.safetensors").read_bytes() == b"weights"
    assert out.endswith("14 bytes  in ckpts, all there\n")


@pytest.mark.slow
def test_download_goes_by_the_environment(hub: FakeHub) -> None:
    def download(**variables: str) -> tuple[str, str, int]:
        with start("ckpt", "download", "open-sora-v2", HF_ENDPOINT=hub.endpoint, HF_HOME="hub", **variables) as process:
            return (*process.communicate(), process.returncode)

    _, err, code = download(HF_HUB_OFFLINE="1")
    assert (code, hub.requests) == (3, [])
    assert "ckpts lacks Open_Sora_v2.safetensors, hunyuan_vae.safetensors" in err
    _, err, code = download()
    assert code == 0, err
    hub.requests.clear()
    out, err, code = download(HF_HUB_OFFLINE="1")
    assert (code, hub.requests) == (0, []), err
    assert out.endswith("in ckpts, all there\n")


@pytest.mark.slow
def test_train_convert_generate(capsys: pytest.CaptureFixture[str]) -> None:
    """With the demo's own sizes: what a training leaves becomes what generating reads, and no option tells it how."""
    demo = ROOT / "opensora_cli" / "assets" / "demo"
    sizes = load_preset("demo", prompt="any").model_dump(mode="json", include={"model", "vae"})
    recipe = {
        "target": "mmdit",
        "output": "run",
        "weights": [str(demo)],
        "data": {"scenes": {"count": 2, "size": 32, "num_frames": 17, "batch_size": 1}, "workers": 0},
        "loop": {"steps": 1},
        "precision": {"compute": "fp32"},
        "train_mmdit": {"video_latent_frames": 2, "easy_latent_frames": 3, "frozen_dtype": "float32"},
        **sizes,
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--config", "recipe.yaml", "--quiet"]) == 0
    target = Path("weights", "transformer.safetensors")
    assert run("convert", "run", str(target), "--select", "ema", capsys=capsys)[0] == 0

    shortest = ["--steps", "1", "--num-frames", "1", "--out", "a.png"]
    assert main(["generate", "raining, sea", "--model", "demo", "--weights", "weights", *shortest]) == 0
    assert "weights: vae, t5, clip are the demo's own" in capsys.readouterr().err
    assert Path("a.png").is_file()
    exported, converted = load_file("run/transformer.safetensors"), load_file(target)
    assert converted.keys() == exported.keys()
    assert all(tensor.half().equal(exported[name]) for name, tensor in converted.items())
