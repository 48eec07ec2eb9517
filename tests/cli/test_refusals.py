"""Wrong requests: exit code and message of each. Most are refused before torch is imported, in one fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_training
import torch
from PIL import Image
from safetensors.torch import save_file

from opensora_cli.cli.app import main

_CODE = """
import json, sys
from opensora_cli.cli.app import main
found = []
for request in json.load(sys.stdin):
    found.append([main(request), "torch" in sys.modules])
    print("=====", file=sys.stderr)
print(json.dumps(found))
"""
TINY_TABLE = ["--set", f"data.table={tiny_training.TABLE}"]
WITHOUT_PARTS = [*TINY_TABLE, "--set", "weights=gone"]
EXPLORE = ["generate", "sea", "--explore", "6", "--explore-steps", "8"]
FLUX = ["generate", "sea", "--model", "flux1-dev", "--num-frames", "1"]
PIXELS = ["generate", "sea", "--model", "open-sora-v2", "--width", "512"]

EARLY = [
    (2, ["generat", "x"], "Did you mean 'generate'"),
    (2, ["generate", "x", "--num-frmes", "5"], "no such option: --num-frmes. Did you mean --num-frames?"),
    (2, ["generate", "x", "--save-dir", "y"], "no such option: --save-dir. Did you mean --out?"),
    (2, ["generate", "x", "--length", "33"], "no such option: --length. Did you mean --num-frames?"),
    (2, ["generate", "x", "--distributed"], "no such option: --distributed. Did you mean --gpus?"),
    (2, ["generate", "x", "--cond_type", "t2v"], "no such option: --cond_type. Did you mean --cond?"),
    (2, ["generate", "--sampling_option.seed=3"], "no such option: --sampling_option.seed. Did you mean --seed?"),
    (2, ["generate", "raining,", "sea"], "quote a text with blanks in it, or see osora generate --help"),
    (2, ["generate", "-sea, raining"], "put a text that begins with - after --"),
    (2, ["generate", "x", "--fit", "zoom"], "condition.fit=zoom must be one of crop, pad, stretch (from --fit)"),
    (2, ["train", "--config"], "requires an argument.\n       see osora train --help"),
    (2, ["ckpt", "convert", "a"], "Missing argument 'DST'"),
    (2, ["generate", "sea", "--on", "8xH100"], "--on has no effect without --dry-run"),
    (2, ["generate", "sea", "--steps", "0"], "sampling.num_inference_steps=0 must be at least 1 (from --steps)"),
    (2, ["generate", "sea", "--num-frames", "16"], "use 17"),
    (2, ["generate", "sea", "--cond", "i2v_head"], "needs a reference"),
    (2, ["generate", ""], "prompt is empty"),
    (2, ["generate", "--prompt", "sea"], "no such option: --prompt. Use the text alone: osora generate"),
    (2, ["generate", "x", "--ref", ""], "--ref is empty"),
    (2, ["generate", "sea", "--refine"], "OSORA_REFINE_URL is not set"),
    (2, ["generate", "sea", "--preset", "786px"], "preset '786px' is not one of 256px, 768px, demo, "),
    (2, [*FLUX, "--guidance-scale", "5"], "--guidance-scale 5 has no effect with the distilled model flux1-dev"),
    (2, [*PIXELS, "--height", "288", "--res", "768px"], "--res 768px has no effect with a width and height in pixels"),
    (2, ["generate", "sea", "--set", "video.picture_frames=9"], "picture_frames=9 (from --set) has no effect unless"),
    (2, ["generate", "--shard", "1/2"], "--shard has no effect without --prompts"),
    (3, ["bench-generate", "--from", "boat.mp4"], "boat.mp4 does not exist"),
    (2, ["generate", "sea", "--prompts", "p.txt"], "PROMPT has no effect with --prompts"),
    (2, ["generate", "--prompts", "p.xlsx"], "--prompts p.xlsx must end in .txt or .csv"),
    (2, ["generate", "sea", "--explore", "2"], "--explore has no effect without --explore-steps"),
    (2, [*EXPLORE, "--stop-at", "8"], "--stop-at has no effect with --explore"),
    (2, ["generate", "--from", "a.mp4", "--resume", "b"], "--resume has no effect with --from"),
    (3, ["generate", "sea", "--ref", "gone.png"], "gone.png does not exist"),
    (3, ["generate", "sea", "--lora", "gone"], "gone is no folder with an adapter"),
    (3, ["generate", "sea", "--model", "open-sora-v2", "--weights", "nowhere"], "weights of the open-sora-v2 model"),
    (3, ["generate", "sea", "--model", "demo", "--weights", "gone"], "gone has no transformer.safetensors for"),
    (3, ["generate", "--from", "gone.mp4"], "gone.mp4 does not exist"),
    (3, ["generate", "sea", "--config", "broken.yaml"], "is not valid YAML"),
    (3, ["show", "there.mp4"], "there.mp4 cannot be read"),
    (2, ["train"], "--config is missing"),
    (2, ["train", "--config", "vae_hunyan"], "did you mean vae_hunyuan?"),
    (2, ["train", "--config", "demo_lora", "--set", "nope=1"], "nope (from --set) is not a setting"),
    (2, ["train", "--config", "vae_hunyuan", "--device", "cpu", "--set", "device=cuda"], "contradicts --device"),
    (2, ["train", "--config", "vae_hunyuan", "--resume", "--overwrite"], "give one of them"),
    (2, ["train", "--config", "vae_hunyuan", "--check-data", "--dry-run"], "--dry-run has no effect with --check-data"),
    (2, ["train", "--config", "vae_hunyuan", "--on", "2x4090"], "--on has no effect without --dry-run"),
    (2, ["train", "--plot", "a.png"], "--plot needs the folders of runs"),
    (2, ["env-check", "--profile", "foo"], "'--profile': 'foo' is not one of 'local', 'cloud', 'cluster'."),
    (2, ["train", "run"], "RUN has no effect without --plot"),
    (3, ["train", "--from", "gone.json"], "gone.json does not exist"),
    (3, ["train", "--config", "demo_lora", "--set", "data.table=gone.csv"], "gone.csv does not exist"),
    (2, ["train", "--config", "demo_lora", "--set", "data.table=none"], "data.table is not set"),
    (3, ["train", "--config", "demo_lora", *WITHOUT_PARTS], "weights=gone has no vae.safetensors, t5, clip"),
    (3, ["train", "--config", "demo_lora", "--set", "init=gone.pt"], "init=gone.pt does not exist"),
    (3, ["train", "--config", "vae_hunyuan", "--resume"], "has no checkpoint to resume from"),
    (3, ["train", "--config", "vae_hunyuan", "--resume-from", "gone"], "gone is no folder of a checkpoint"),
    (3, ["train", "--config", "vae_hunyuan", "--set", "output=run"], "run holds an earlier run: log.jsonl"),
    (2, ["ckpt", "convert", "there.pt", "there.pt"], "there.pt is also the source"),
    (2, ["ckpt", "download", "open-sora"], "did you mean open-sora-v2?"),
    (3, ["ckpt", "convert", "gone.safetensors", "out"], "gone.safetensors does not exist"),
    (3, ["ckpt", "convert", "there.mp4", "there.pt"], "there.pt exists already"),
    (2, ["vae", "reconstruct", "there.mp4", "--config", "dcae"], "preset 'dcae' is not one of dc_ae, demo, "),
    (3, ["vae", "reconstruct", "gone.mp4"], "gone.mp4 does not exist"),
    (3, ["vae", "reconstruct", "there.mp4", "--config", "hunyuan"], "hunyuan_vae.safetensors"),
    (3, ["vae", "reconstruct", "there.mp4", "-o", "run"], "there_reconstructed.mp4 exists already"),
    (2, ["bench-generate", "--try", "sampling.nope=1"], "sampling.nope (from --try sampling.nope=1)"),
    (2, ["mem-profile", "--config", "demo_lora", "--device", "cuda"], "--device cuda is not possible"),
    (2, ["mem-profile", "--memory-limit", "1GiB"], "memory_limit=1073741824 has no effect without adaptive_batch"),
    (2, ["mem-profile", "--adaptive-batch"], "a generation computes one clip at a time"),
    (2, ["mem-profile", "--config", "demo_lora", "--snapshot", "x"], "--snapshot has no effect with a training"),
    (2, ["env-check", "--export"], "--export needs a profile"),
    (2, ["env-check", "--profile", "local", "x.sh"], "FILE has no effect with --profile"),
    (2, ["data", "cache", "--config", "vae_hunyuan"], "only mmdit has a use for a cache"),
    (2, ["data", "cache", "--config", "demo_lora", "--set", "train_mmdit.cache=none"], "train_mmdit.cache is not set"),
    (3, ["data", "cache", "--config", "demo_lora", *WITHOUT_PARTS], "has no vae.safetensors, t5, clip"),
    (3, ["data", "scan", "gone"], "gone does not exist"),
]


def test_wrong_requests_are_refused_before_torch_is_imported(tmp_path, monkeypatch):
    for name in ("there.mp4", "there.pt", "run/log.jsonl", "run/there_reconstructed.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "broken.yaml").write_text("a: [")
    # With the released model at hand, torch alone knows which model fits its devices.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps([request for _, request, _ in EARLY]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    [document] = done.stdout.splitlines()
    messages = done.stderr.split("=====\n")[:-1]
    found = json.loads(document)
    wrong = [
        (request, code, message)
        for (expected, request, text), (code, has_torch), message in zip(EARLY, found, messages, strict=True)
        if (code, has_torch) != (expected, False) or text not in message or message.count("error: ") != 1
    ]
    assert wrong == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.yaml", "run", "there.mp4", "there.pt"]


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("executed"),)  # type: ignore[return-value]


GOOD = "good.safetensors"
HERE = ["--device", "cpu"]
BOTH = ["generate", "sea", *HERE, "--gpus", "2", "--set"]
PLANNED = ["generate", "sea", "--res", "256px", "--dry-run", "--on"]


@pytest.mark.parametrize(
    ("code", "request_", "message"),
    [
        (2, ["ckpt", "verify", GOOD, "--preset", "flux-dev"], "did you mean flux1-dev?"),
        (2, ["ckpt", "convert", GOOD, "x", "--select", "ema"], "has no ema weights"),
        (2, ["ckpt", "convert", GOOD, "x", "--qkv", "split"], "is for an MMDiT"),
        (3, ["ckpt", "inspect", "truncated.safetensors"], "truncated"),
        (3, ["ckpt", "convert", "evil.pt", "x"], "evil.pt is refused: it imports"),
        (3, ["ckpt", "merge-lora", GOOD, "folder", "x"], "adapter_config.json does not exist"),
        (3, ["ckpt", "convert", GOOD, "file/x"], "file is not a folder"),
        (3, ["ckpt", "convert", GOOD, "x" * 300], "cannot write xxx"),
        (3, ["train", "--config", "demo_lora", *TINY_TABLE, "--set", "output=file/run"], "cannot write in file/run"),
        (2, ["train", "--config", "vae_hunyuan", "--gpus", "2", "--set", "device=cuda:0"], "device=cuda:0 is one GPU"),
        (3, ["mem-profile", "--snapshot", "folder"], "is a folder"),
        (3, ["mem-profile", "--plot", "/dev/null/memory.png"], "cannot write in /dev/null"),
        (3, ["vae", "reconstruct", "a.png", "--out", "file"], "it is not a folder"),
        (3, ["vae", "stats", "folder"], "folder has no pictures or videos"),
        (4, ["generate", "raining, sea", "--devices", "3"], "device=cuda:3 is not there"),
        (4, ["generate", "raining, sea", "--gpus", "100"], "gpus=100, and this machine has"),
        (4, ["bench-generate", "--model", "demo", "--gpus", "99", "--device", "cuda"], "gpus=99, and this machine has"),
        (4, ["mem-profile", "--device", "cuda:99"], "device=cuda:99 is not there"),
        (4, ["vae", "stats", "a.png", "--device", "cuda:99"], "device=cuda:99 is not there"),
        (2, [*PLANNED, "H100", "--device", "cpu"], "--on H100 plans for GPUs, and the device is cpu"),
        (2, [*PLANNED, "H100", "--gpus", "16"], "and gpus_per_node=8 of H100: use --on 16xH100"),
        (2, [*PLANNED, "64xH100", "--set", "parallel.tensor_parallel_degree=64"], "parallel.tensor_parallel_degree=64"),
        (4, ["generate", "sea", "--dry-run", *HERE, "--attention", "cudnn"], "runs on CUDA devices only"),
        (2, ["generate", "sea", *HERE, "--gpus", "3", "--set", "parallel.cfg_parallel_degree=3"], "use at most 2"),
        (
            2,
            [*BOTH, "parallel.data_parallel_degree=2"],
            "spreads the rows of --prompts",
        ),
    ],
)
def test_wrong_requests_that_the_engine_refuses(code, request_, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file({"a.weight": torch.arange(6.0).view(2, 3)}, GOOD)
    Path("truncated.safetensors").write_bytes(Path(GOOD).read_bytes()[:-3])
    torch.save({"weight": torch.ones(2), "evil": _Payload()}, "evil.pt")
    Image.new("RGB", (64, 64)).save("a.png")
    Path("folder").mkdir()
    Path("file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main([*request_, "--quiet"]) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("error: ")) == ("", 1)
    assert message in printed.err
    assert sorted(tmp_path.rglob("*")) == before
