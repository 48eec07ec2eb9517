"""Wrong requests are refused before torch is imported: all of them in one fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_CODE = """
import json, sys
from opensora_cli.cli.app import main
print(json.dumps([[main(request), "torch" in sys.modules] for request in json.load(sys.stdin)]))
"""

REQUESTS = [
    (2, ["generate", "sea", "--nonsense"], "--nonsense"),
    (2, ["generate", "sea", "--explore", "2"], "--explore needs --explore-steps"),
    (2, ["generate", "sea", "--on", "8xH100"], "has no effect without --dry-run"),
    (2, ["generate", "sea", "--stop-at", "60"], "stop_at=60"),
    (2, ["generate", "sea", "--set", "parallel.ulysses_degree=5"], "parallel.ulysses_degree=5"),
    (2, ["generate", "sea", "--set", "nope.key=1"], "nope.key (from --set) is not a setting"),
    (2, ["generate", "sea", "--steps", "0"], "num_inference_steps=0 must be at least 1"),
    (2, ["generate", "sea", "--num-frames", "16"], "use 17"),
    (2, ["generate", "sea", "--res", "768px"], "is not a size of the demo model"),
    (2, ["generate", "sea", "--cond", "i2v_head"], "needs a reference"),
    (2, ["generate", ""], "prompt is empty"),
    (3, ["generate", "sea", "--ref", "gone.png"], "gone.png does not exist"),
    (3, ["generate", "sea", "--ref", "gone.png", "--dry-run"], "gone.png does not exist"),
    (3, ["generate", "sea", "--lora", "gone"], "gone is no folder with an adapter"),
    (3, ["generate", "sea", "--model", "open-sora-v2", "--weights", "nowhere"], "weights of the open-sora-v2 model"),
    (3, ["generate", "sea", "--out", "there.mp4"], "there.mp4 exists already"),
    (3, ["generate", "sea", "--from", "gone.json"], "gone.json does not exist"),
    (3, ["generate", "--from-latents", "gone.safetensors"], "gone.safetensors does not exist"),
    (3, ["generate", "--resume", "gone.safetensors"], "gone.safetensors does not exist"),
    (3, ["generate", "--from", "gone.latents.safetensors"], "gone.latents.safetensors does not exist"),
    (3, ["generate", "--from", "gone.mp4"], "gone.mp4 has no sidecar gone.mp4.json beside it"),
    (2, ["generate", "sea", "--profile"], "no such option: --profile. Use osora bench-generate"),
    (3, ["show", "gone.mp4"], "gone.mp4 does not exist"),
    (3, ["show", "there.mp4"], "there.mp4 cannot be read"),
    (3, ["generate", "sea", "--config", "gone.yaml"], "gone.yaml does not exist"),
    (3, ["generate", "sea", "--config", "broken.yaml"], "is not valid YAML"),
    (2, ["train", "--config", "demo", "--nonsense"], "--nonsense"),
    (2, ["train", "--config", "demo", "--set", "nope=1"], "nope (from --set) is not a setting"),
    (3, ["train", "--config", "demo_lora", "--set", "data.table=gone.csv"], "gone.csv does not exist"),
    (3, ["train", "--config", "demo_lora", "--set", "data.table=gone.csv", "--check-data"], "gone.csv does not exist"),
    (
        3,
        ["train", "--config", "demo_short"],
        "weights=runs/demo_decoder,runs/demo_text has no vae.safetensors, t5, clip",
    ),
    (3, ["train", "--config", "demo_short", "--gpus", "2"], "has no vae.safetensors, t5, clip"),
    (3, ["train", "--config", "demo"], "init=runs/demo_short/transformer.safetensors does not exist"),
    (3, ["train", "--config", "demo_vae", "--set", "init=gone.pt"], "init=gone.pt does not exist"),
    (3, ["train", "--config", "demo_vae", "--resume"], "has no checkpoint to resume from"),
    (3, ["train", "--config", "demo_vae", "--resume-from", "gone"], "gone is no folder of a checkpoint"),
    (2, ["train", "--config", "demo_vae", "--resume", "--overwrite"], "give one of them"),
    (3, ["train", "--config", "demo_vae", "--set", "output=run"], "run holds an earlier run: log.jsonl"),
    (3, ["ckpt", "convert", "gone.safetensors", "out"], "gone.safetensors does not exist"),
    (3, ["ckpt", "convert", "there.mp4", "there.pt"], "there.pt exists already"),
    (2, ["ckpt", "convert", "there.pt", "there.pt"], "there.pt is what is read"),
    (3, ["ckpt", "merge-lora", "there.mp4", "run", "there.pt"], "there.pt exists already"),
    (3, ["ckpt", "verify", "gone.safetensors"], "gone.safetensors does not exist"),
    (3, ["ckpt", "inspect", "gone.safetensors"], "gone.safetensors does not exist"),
    (3, ["ckpt", "diff", "there.mp4", "gone.safetensors"], "gone.safetensors does not exist"),
    (3, ["ckpt", "merge-lora", "there.mp4", "gone", "out.safetensors"], "gone does not exist"),
    (2, ["vae", "reconstruct", "there.mp4", "--set", "nope=1"], "nope (from --set) is not a setting"),
    (3, ["vae", "reconstruct", "gone.mp4"], "gone.mp4 does not exist"),
    (3, ["vae", "reconstruct", "there.mp4", "--config", "hunyuan"], "hunyuan_vae.safetensors"),
    (3, ["vae", "reconstruct", "there.mp4", "-o", "run"], "there_reconstructed.mp4 exists already"),
    (3, ["vae", "stats", "gone.mp4"], "gone.mp4 does not exist"),
    (2, ["bench-comm", "--plot", "there.mp4"], "must end in .png"),
    (
        2,
        ["bench-generate", "--model", "demo", "--try", "sampling.nope=1"],
        "sampling.nope (from --try sampling.nope=1)",
    ),
    (2, ["bench-generate", "--model", "demo", "--set", "sampling.stop_at=2"], "stop_at=2 cannot be compared"),
    (2, ["mem-profile", "--set", "nope=1"], "nope (from --set) is not a setting"),
    (2, ["data", "cache", "--config", "demo_text"], "only mmdit has a use for a cache"),
    (3, ["data", "cache", "--config", "demo"], "has no vae.safetensors, t5, clip"),
    (3, ["data", "cache", "--config", "demo_lora", "--table", "gone.csv"], "gone.csv does not exist"),
    (3, ["data", "scan", "gone"], "gone does not exist"),
    (3, ["data", "shard", "gone.csv", "--parts", "2"], "gone.csv does not exist"),
    (3, ["data", "preview", "gone.csv", "-o", "sheet.png"], "gone.csv does not exist"),
]


def test_wrong_requests_are_refused_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.mp4").write_text("mine")
    (tmp_path / "there.pt").write_text("mine")
    (tmp_path / "run").mkdir()
    for name in ("log.jsonl", "there_reconstructed.mp4"):
        (tmp_path / "run" / name).write_text("mine")
    (tmp_path / "broken.yaml").write_text("a: [")
    # Where the released model is, nothing is known of torch's devices but by torch itself.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps([request for _, request, _ in REQUESTS]),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(code, has_torch) for code, has_torch in found] == [(code, False) for code, _, _ in REQUESTS]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [text for (_, _, text), line in zip(REQUESTS, errors, strict=True) if text not in line] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.yaml", "run", "there.mp4", "there.pt"]
