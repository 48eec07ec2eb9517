"""Small valid files of every format, made once, and the command lines that read each of them."""

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import adapter_styles
import tiny_adapters
import tiny_clips
import tiny_frozen
import tiny_training
import tiny_world
import torch
import yaml
from hostile.sandbox import Folder, Sandbox
from safetensors.torch import save_file

from opensora_cli.engine.components.architectures import mmdit_config
from opensora_cli.models.mmdit.model import MMDiT

Names = tuple[str, ...]


@dataclass(frozen=True)
class Base:
    """A command line in which nothing is wrong: what it reads, and what it replaces."""

    name: str
    argv: Names
    reads: Names = ()
    replaces: Names = ()
    code: int = 0
    seconds: float = 1.0
    """About how long it takes on an idle core."""


def _base(name: str, words: str, reads: str = "", replaces: str = "", code: int = 0, seconds: float = 1.0) -> Base:
    return Base(name, _words(words), tuple(reads.split()), tuple(replaces.split()), code, seconds)


def _words(text: str) -> Names:
    return tuple(shlex.split(text))


_MADE = "made.latents.safetensors"
_TINY = "generate 'raining sea' --config generate.yaml"
_PLAIN = "weights.safetensors"
_WEIGHTS = (_PLAIN, "weights.pt", "shards", "colossal", "dcp")
_CLIPS = ("clips", "clips.csv")
_OF_VAE = "vae.yaml clips clips.csv"
_READ = "clips.yaml frozen clips clips.csv"
_KINDS = ("torch", "safetensors-shards", "dcp", "colossalai")

BASES: tuple[Base, ...] = (
    _base("generate", f"{_TINY} --out out.mp4", "generate.yaml tiny"),
    _base("generate picture", f"{_TINY} --num-frames 1 --out out.png", "generate.yaml tiny"),
    _base("generate gif", f"{_TINY} --out out.gif --num-samples 2", "generate.yaml tiny"),
    _base("generate plan", f"{_TINY} --dry-run --json", "generate.yaml tiny"),
    _base("generate from picture", f"{_TINY} --ref picture.png --out out.gif", "generate.yaml tiny picture.png"),
    _base("generate from video", f"{_TINY} --ref video.mp4 --json", "generate.yaml tiny video.mp4"),
    _base("generate with adapter", f"{_TINY} --lora adapter:0.5", "generate.yaml tiny adapter"),
    _base("generate with a LoRA file", f"{_TINY} --lora style.safetensors", "generate.yaml tiny style.safetensors"),
    _base("generate again", "generate --from made.mp4.json --weights tiny --out out.mp4", "tiny made.mp4.json"),
    _base("generate from latents", f"generate --from-latents {_MADE} --weights tiny --out out.mp4", f"tiny {_MADE}"),
    _base("train vae", "train --config vae.yaml", _OF_VAE),
    _base("train vae", "train --config vae.yaml --json", _OF_VAE),
    _base("train mmdit", "train --config mmdit.yaml", "mmdit.yaml frozen clips clips.csv"),
    _base("train plan", "train --config vae.yaml --dry-run", "vae.yaml clips clips.csv", seconds=2.0),
    _base("train resumed", "train --config vae.yaml --resume", "vae.yaml run clips clips.csv", "work/run"),
    _base("train again", "train --config vae.yaml --overwrite", "vae.yaml run clips clips.csv", "work/run"),
    _base("train from", "train --from run/settings.json --set output=other", "run clips clips.csv"),
    _base("train on clips", "train --config clips.yaml", _READ),
    _base("train check", "train --config clips.yaml --check-data", _READ),
    _base("train list", "train --list"),
    *(_base(f"inspect {path}", f"ckpt inspect {path} --all", path) for path in _WEIGHTS),
    *(_base(f"verify {path}", f"ckpt verify {path}", path) for path in _WEIGHTS),
    *(_base(f"convert {path}", f"ckpt convert {path} out.safetensors", path) for path in _WEIGHTS),
    *(_base(f"convert to {kind}", f"ckpt convert {_PLAIN} out --format {kind}", _PLAIN) for kind in _KINDS),
    _base("convert run", "ckpt convert run out.safetensors --select ema", "run"),
    _base("inspect run", "ckpt inspect run --json", "run"),
    _base("merge", "ckpt merge-lora base.safetensors adapter out.pt", "base.safetensors adapter"),
    _base("download plan", "ckpt download open-sora-v2", code=3),
    _base("scan", "data scan clips --out table.csv", "clips"),
    _base("scan to parquet", "data scan clips --out table.parquet --json", "clips"),
    _base("scan again", "data scan clips --overwrite", "clips clips.csv", "work/clips.csv"),
    _base("shard", "data shard clips.csv --parts 2", "clips clips.csv"),
    _base("cache", "data cache --config clips.yaml --out cache", _READ),
    _base("cache filled", "data cache --config clips.yaml --out filled", f"{_READ} filled", "work/filled"),
    _base("train on cache", "train --config clips.yaml --set train_mmdit.cache=filled", f"{_READ} filled"),
    _base("reconstruct", "vae reconstruct video.mp4 picture.png", "video.mp4 picture.png"),
    _base("reconstruct with run", "vae reconstruct picture.png --config run/settings.json", "run picture.png"),
    _base("stats", "vae stats clips picture.png --json", "clips picture.png"),
    _base("profile", "mem-profile --config generate.yaml --runs 0", "generate.yaml", seconds=2.0),
    _base("profile training", "mem-profile --config vae.yaml --runs 1 --plot memory.png", _OF_VAE, seconds=3.0),
    _base("environment", "env-check Dockerfile train.sh --no-all-reduce", "Dockerfile train.sh"),
    _base("variables", "env-check --profile local --export"),
    _base("reference", "generate 'a boat' --config reference.py --dry-run", "reference.py", seconds=3.0),
)


@dataclass(frozen=True)
class Inputs:
    folder: Path

    def putting(self, base: Base) -> Callable[[Folder], None]:
        return lambda folder: self.put(base, folder)

    def put(self, base: Base, folder: Folder) -> None:
        for name in base.reads:
            source, target = self.folder / name, folder.work / name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copyfile(source, target)


def make_inputs(sandbox: Sandbox, folder: Path) -> Inputs:
    """Write everything below `folder`, some of it through osora itself in the sandbox."""
    folder.mkdir(parents=True)
    _write_worlds(folder)
    _write_weights(folder)
    _write_clips(folder)
    _write_texts(folder)
    inputs = Inputs(folder)
    add = partial(_add, sandbox, inputs)
    add(("clips",), ("data", "scan", "clips"))
    table = inputs.folder / "clips.csv"
    table.write_text(re.sub("^/.*/clips/", "clips/", table.read_text(), flags=re.MULTILINE))
    made = _words(f"{_TINY} --out made.mp4")
    add(("generate.yaml", "tiny"), made)
    add(("generate.yaml", "tiny"), made, code=3, patch="hostile.breaking:refuse_media")
    add(("vae.yaml", *_CLIPS), ("train", "--config", "vae.yaml", "--set", "loop.steps=2"))
    add(("generate.yaml", "tiny"), _words(f"{_TINY} --out many.png"))
    add((_PLAIN,), ("ckpt", "convert", _PLAIN, "shards", "--shard-size", "8KB"))
    for kind, name in (("dcp", "dcp"), ("colossalai", "colossal"), ("torch", "weights.pt")):
        add((_PLAIN,), ("ckpt", "convert", _PLAIN, name, "--format", kind))
    add(tuple(_READ.split()), ("data", "cache", "--config", "clips.yaml", "--out", "filled"))
    return inputs


def _add(sandbox: Sandbox, inputs: Inputs, reads: Names, argv: Names, *, code: int = 0, patch: str = "") -> None:
    with sandbox.folder() as folder:
        inputs.put(Base("", argv, reads), folder)
        sandbox.give_away(folder)
        outcome = sandbox.run(argv, folder, patch=patch)
        assert outcome.code == code, f"osora {' '.join(argv)}: {outcome}\n{outcome.stderr}"
        for made in folder.work.iterdir():
            if made.name not in reads:
                made.rename(inputs.folder / made.name)


def _write_worlds(folder: Path) -> None:
    world = tiny_world.make_world(folder)
    shutil.rmtree(world.released)
    world.demo.rename(folder / "tiny")
    tiny_frozen.save_frozen_parts(folder / "frozen")
    settings = tiny_world.demo_settings(world, folder)
    transformer = MMDiT(mmdit_config(settings.model))
    base = {key: weight.detach() for key, weight in transformer.state_dict().items()}
    save_file(base, folder / "base.safetensors")
    tiny_adapters.write_lora(folder / "adapter", transformer, like="double_blocks.*")
    fused = {
        "double_blocks.0.img_attn.qkv.weight": torch.empty(3 * settings.model.hidden_size, settings.model.hidden_size)
    }
    save_file(adapter_styles.kohya(adapter_styles.fused_factors(fused)), folder / "style.safetensors")


def _write_weights(folder: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    plain = {f"layer.{n}.weight": torch.randn(24, 24, generator=generator) for n in range(8)}
    plain |= {f"layer.{n}.bias": torch.zeros(24, dtype=torch.bfloat16) + n for n in range(8)}
    save_file(plain, folder / "weights.safetensors", metadata={"format": "pt"})


def _write_clips(folder: Path) -> None:
    clips = folder / "clips"
    clips.mkdir()
    for number in range(4):
        tiny_clips.write_clip(clips / f"clip{number}.mp4", num_frames=13, caption=f"raining on the sea {number}")
    for number in range(2):
        tiny_clips.write_clip(clips / f"picture{number}.png", num_frames=1)
        (clips / f"picture{number}.json").write_text('{"caption": "a boat at night"}')


def _write_texts(folder: Path) -> None:
    short = {"video.num_frames": "17", "sampling.num_inference_steps": "2"}
    sizes = tiny_world.DEMO_SIZES | short | {"runtime.weights": "tiny"}
    (folder / "generate.yaml").write_text(yaml.safe_dump(_nested(sizes)))
    output = Path("run")
    documents = {
        "vae": (tiny_training.vae_settings(output), {"5": [1.0, 2]}),
        "mmdit": (tiny_training.mmdit_settings(output, Path("frozen")), {"13": [1.0, 2]}),
        "clips": (tiny_training.mmdit_settings(output, Path("frozen")), {"1": [1.0, 2], "13": [1.0, 2]}),
    }
    for name, (settings, lengths) in documents.items():
        document = settings.model_dump(mode="json", exclude_unset=True)
        data = {"table": "clips.csv", "buckets": {"64px": lengths}, "workers": 0}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**document, "data": data}))
    (folder / "Dockerfile").write_text(
        "FROM python:3.12\nENV NCCL_DEBUG=INFO OMP_NUM_THREADS=4\nRUN pip install torch\n"
    )
    (folder / "prompts.csv").write_text("prompt\nraining sea\na boat at night\n")
    (folder / "train.sh").write_text("#!/bin/bash\nexport NCCL_P2P_DISABLE=1\nosora train --config demo_lora\n")
    (folder / "reference.py").write_text('save_dir = "samples"\nsampling_option = dict(num_frames=17, num_steps=3)\n')


def _nested(overrides: Mapping[str, str]) -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections
