"""Measure the released model at its full size on a CPU, with random weights, beside the predictions.

    python benchmarks/full_size.py --folder /big/disk/full-size
    python benchmarks/full_size.py --folder /big/disk/full-size --only generate

Random weights are made under the released names: 34 GB, or 45 GB with the converted file, are checked first. Then the
commands run one after the other, each in its own process: `ckpt inspect`, `ckpt verify`, a conversion to 8 bits,
`generate` at 256px, 1 frame in 2 steps, with the default plan and with 6 GiB. The last commands encode a picture of
256px and train an adapter on it for one step. Finished steps are in the log, and the same command continues after them;
`--only` runs a step again. Values of weights change neither memory nor time.

Private memory is the peak of the process's own memory (`RssAnon`), and mapped memory the resident peak of its mapped
files (`RssFile`). Read is the number of bytes from the disk. Linux reports all three, sampled ten times a second.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from opensora_cli.checkpoint.formats.safetensors import place_tensors
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.core.device import GIB
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.files import require_space
from opensora_cli.engine.components.architectures import autoencoder_on_meta, on_meta, transformer_on_meta
from opensora_cli.media.write import write_media
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.settings.load import load_preset

SCHEMA = "osora.bench.full_size/1"
LOG = Path(__file__).parent / "logs" / "full_size.jsonl"
_PROMPT = "raining, sea"
_NOISE_NUMBERS = 2**24
_STD = 0.02
_LOOK_S = 0.1
_SIDE = 256
_FIGURES = ("timings_s", "model_evaluations", "parameters", "encoded")
T5 = {
    **{"d_model": 4096, "d_kv": 64, "d_ff": 10_240, "num_layers": 24, "num_heads": 64},
    "feed_forward_proj": "gated-gelu",
}
CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


@dataclass(frozen=True)
class Place:
    """Folder of a run, with the paths in it."""

    folder: Path

    @property
    def weights(self) -> Path:
        """Folder of the weights under the released names."""
        return self.folder / "weights"

    @property
    def converted(self) -> Path:
        """File of the transformer in 8 bits."""
        return self.folder / "fp8.safetensors"

    @property
    def results(self) -> Path:
        """Folder of the pictures."""
        return self.folder / "results"

    @property
    def caches(self) -> Path:
        """Cache folder instead of the user's: the first generation encodes its prompts, and the second reads them."""
        return self.folder / "caches"

    @property
    def data(self) -> Path:
        """Folder of a picture and its table."""
        return self.folder / "data"

    @property
    def training(self) -> Path:
        """Folder of the training run and the encoded picture."""
        return self.folder / "training"

    def clean(self) -> None:
        """Remove the files of a run, and the folder if it is empty then."""
        for path in (self.weights, self.results, self.caches, self.data, self.training):
            shutil.rmtree(path, ignore_errors=True)
        self.converted.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def outlines(place: Place) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the tensors of each weight file, on the meta device, and write the files beside the weights."""
    settings = load_preset("256px", prompt=_PROMPT)
    files, found = settings.files, dict[str, Mapping[str, torch.Tensor]]()
    found[files.transformer] = transformer_on_meta(settings.model).state_dict()
    found[files.vae] = autoencoder_on_meta(settings.vae).state_dict()
    t5, clip = place.weights / files.t5, place.weights / files.clip
    found[f"{files.t5}/model.safetensors"] = save_t5(t5, T5).state_dict()
    found[f"{files.clip}/model.safetensors"] = save_clip(clip, CLIP).state_dict()
    return found


def save_t5(folder: Path, sizes: Mapping[str, Any]) -> T5Model:
    """Write the files beside the weights of a T5, and return the model without weights."""
    save_tokenizer(folder, transformers.T5Config(**sizes), ["<pad>", "</s>", "<unk>"], start=None, end=1)
    with on_meta():
        return T5Model(T5Sizes.of(folder))


def save_clip(folder: Path, sizes: Mapping[str, Any]) -> ClipTextModel:
    """Write the files beside the weights of a CLIP, and return its text tower without weights."""
    save_tokenizer(folder, transformers.CLIPTextConfig(**sizes), ["<pad>", "<unk>"], start=49_406, end=49_407)
    with on_meta():
        return ClipTextModel(ClipSizes.of(folder))


def save_tokenizer(folder: Path, config: Any, first: Sequence[str], *, start: int | None, end: int) -> None:
    """Write the configuration of a text encoder, and a vocabulary of a few words."""
    config.save_pretrained(folder)
    words = {word: index for index, word in enumerate(dict.fromkeys([*first, *_PROMPT.replace(",", " ,").split()]))}
    words["</s>"] = end
    template = "$A </s>"
    if start is not None:
        words["<s>"], template = start, "<s> $A </s>"
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, words[word]) for word in ("<s>", "</s>") if word in words]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def make_weights(place: Place) -> dict[str, Any]:
    """Write the missing weights, after checking the disk space. Raises OutputError if there is too little."""
    files = {name: placed_in_bf16(tensors) for name, tensors in outlines(place).items()}
    total = sum(size for _, size in files.values())
    transformer = max(size for _, size in files.values())
    there = sum(path.stat().st_size for path in place.folder.rglob("*") if path.is_file())
    needed = max(0, total + transformer // 2 - there)
    print(f"{place.folder} needs {needed / 1e9:.1f} GB more: weights, and those in 8 bits", flush=True)
    require_space(place.folder, needed)
    noise = torch.randn(_NOISE_NUMBERS, generator=torch.Generator().manual_seed(0)).mul_(_STD).bfloat16()
    start = time.perf_counter()
    for name, (header, size) in files.items():
        fill(place.weights / name, header, size, noise.view(torch.uint8).numpy().data)
    return {"seconds": time.perf_counter() - start, "written_gb": total / 1e9}


def placed_in_bf16(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, int]:
    """Return the header and the size of a safetensors file of these tensors in bfloat16."""
    entries = {
        name: LazyTensor.of(torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta"))
        for name, tensor in tensors.items()
    }
    placement = place_tensors(entries, metadata={})
    return placement.header, placement.size


def fill(path: Path, header: bytes, size: int, noise: memoryview) -> None:
    """Write a file of noise after a header, unless it is there."""
    if path.exists() and path.stat().st_size == size:
        return
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        left = size - file.write(header)
        while left:
            left -= file.write(noise[:left])
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def make_data(place: Place) -> None:
    """Write a picture and a table with it."""
    place.data.mkdir(parents=True, exist_ok=True)
    levels_1HWC = torch.arange(3 * _SIDE**2).mul(7).remainder(256).to(torch.uint8).view(1, _SIDE, _SIDE, 3)
    write_media([levels_1HWC], place.data / "picture.png", fps=1.0, format="png")
    rows = "path,text,num_frames,height,width,fps", f'picture.png,"{_PROMPT}",1,{_SIDE},{_SIDE},'
    (place.data / "pictures.csv").write_text("\n".join(rows) + "\n")


@dataclass(frozen=True)
class Step:
    """Command to run and measure."""

    name: str
    arguments: Callable[[Place, int], Sequence[str]]
    is_planned: bool = False
    """Whether the command has a plan."""


def _generate(name: str, *more: str) -> Callable[[Place, int], Sequence[str]]:
    def arguments(place: Place, threads: int) -> Sequence[str]:
        return (
            *("generate", _PROMPT, "--model=open-sora-v2", f"--weights={place.weights}", "--num-frames=1", "--steps=2"),
            *("--set=picture.first=false", "--res=256px", "--seed=7", "--device=cpu", f"--threads={threads}", *more),
            *(f"--out={place.results / name}.png", "--overwrite", "--json", "--quiet"),
        )

    return arguments


def _training(*command: str) -> Callable[[Place, int], Sequence[str]]:
    def arguments(place: Place, threads: int) -> Sequence[str]:
        changes = {
            "output": place.training / "run",
            "weights": place.weights,
            "init": _transformer(place),
            "data.table": place.data / "pictures.csv",
            "data.buckets": "{256px: {1: [1.0, 1]}}",
            "data.workers": 0,
            "train_mmdit.cache": place.training / "cache",
            # A CPU without bf16 has kernels for products in fp32.
            "precision.compute": "fp32",
            "optimizer.warmup_steps": 0,
            "loop.steps": 1,
            "loop.log_every": 1,
        }
        sets = (f"--set={key}={value}" for key, value in changes.items())
        common = "--config=stage1_lora_16gib", "--device=cpu", f"--threads={threads}", "--json", "--quiet"
        return *command, *common, *sets

    return arguments


def _transformer(place: Place) -> str:
    return str(place.weights / load_preset("256px", prompt=_PROMPT).files.transformer)


STEPS = (
    Step("inspect", lambda place, _: ("ckpt", "inspect", _transformer(place), "--json")),
    Step("verify", lambda place, _: ("ckpt", "verify", _transformer(place), "--json")),
    Step(
        "convert",
        lambda place, _: (
            *("ckpt", "convert", _transformer(place), str(place.converted)),
            *("--dtype=fp8_e4m3", "--overwrite", "--json"),
        ),
    ),
    Step("generate", _generate("default"), is_planned=True),
    Step("generate in 6 GiB", _generate("limited", "--memory-limit=6GiB"), is_planned=True),
    Step("encode for LoRA", _training("data", "cache")),
    Step("LoRA", _training("train", "--overwrite"), is_planned=True),
)


def run(step: Step, place: Place, threads: int) -> dict[str, Any]:
    """Run a step, and return its measurements and its plan. Raises RuntimeError if the step fails."""
    arguments = step.arguments(place, threads)
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    environment |= {"XDG_CACHE_HOME": str(place.caches), "HF_HUB_OFFLINE": "1"}
    shown = [argument.replace(str(place.folder), "DIR") for argument in arguments]
    record: dict[str, Any] = {"command": ["osora", *shown]}
    if step.is_planned:
        planned = subprocess.run(
            [sys.executable, "-m", "opensora_cli", *arguments, "--dry-run"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        record["plan"] = _plan_of(json.loads(_output(planned)))
    measured, output = watched([sys.executable, "-m", "opensora_cli", *arguments], environment)
    record |= measured
    document = json.loads(output)
    return record | {key: document[key] for key in _FIGURES if key in document}


def _plan_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a plan for a generation, or for a training, which plans no mapped memory."""
    if "stages" not in document:
        (rank,) = document["memory"]
        kinds = {name.removesuffix("_bytes"): size / GIB for name, size in rank.items() if name.endswith("_bytes")}
        return {"peak_gib": kinds.pop("peak"), "stages_gib": {}, "most_gib": kinds}
    stages = {each["name"]: {"private": each["total_gib"], "mapped": each["mapped_gib"]} for each in document["stages"]}
    names = "peak_gib", "free_gib", "cached_text", "fits"
    return {"stages_gib": stages, **{name: document[name] for name in names}}


def _output(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def watched(command: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Run a command, and return its seconds, peak memory and bytes read, and its output."""
    start = time.perf_counter()
    most = dict.fromkeys(("RssAnon", "RssFile", "read_bytes"), 0)
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, env=environment, stdout=printed)
        while process.poll() is None:
            for name, figure in _figures_of(process.pid):
                most[name] = max(most[name], figure)
            time.sleep(_LOOK_S)
        printed.seek(0)
        output = printed.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "seconds": time.perf_counter() - start,
        "private_gib": most["RssAnon"] * 1024 / GIB,
        "mapped_gib": most["RssFile"] * 1024 / GIB,
        "read_gb": most["read_bytes"] / 1e9,
    }, output


def _figures_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield memory in KiB and bytes that were read; nothing for a process that has just ended."""
    with suppress(OSError):
        for file in ("status", "io"):
            for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("RssAnon", "RssFile", "read_bytes"):
                    yield name, int(value.split()[0])


def read_log(log: Path) -> dict[str, dict[str, Any]]:
    """Return the last record of each step."""
    lines = log.read_text().splitlines() if log.exists() else []
    records = [json.loads(line) for line in lines]
    return {record["step"]: record for record in records}


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the measurements as a table in Markdown."""
    lines = [
        "| step | seconds | private, GiB | the plan's | mapped, GiB | the plan's | read, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, record in records.items():
        plan = record.get("plan")
        private, mapped = "", ""
        if plan is not None:
            private = f"{plan['peak_gib']:.2f}"
            planned = [stage["mapped"] for stage in plan["stages_gib"].values()]
            mapped = f"{max(planned):.2f}" if planned else ""
        cells = [f"{record[key]:.2f}" if key in record else "" for key in ("private_gib", "mapped_gib", "read_gb")]
        seconds = f"{record['seconds']:.0f}"
        lines.append(f"| {' | '.join([name, seconds, cells[0], private, cells[1], mapped, cells[2]])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the steps that are not in the log yet, and print the table."""
    names = ["weights", *(step.name for step in STEPS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where weights and results go")
    parser.add_argument("--only", action="append", choices=names, help="run this step, also again; repeatable")
    parser.add_argument("--log", type=Path, default=LOG, help="where each step that is finished is written")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="that compute")
    parser.add_argument("--clean", action="store_true", help="remove what is in the folder, and run nothing")
    given = parser.parse_args(arguments)
    place = Place(given.folder.absolute())
    if given.clean:
        place.clean()
        return
    there = read_log(given.log)
    for name in names:
        if name not in given.only if given.only else name != "weights" and name in there:
            continue
        print(f"{name} ...", flush=True)
        step = next((each for each in STEPS if each.name == name), None)
        try:
            if step is None:
                record = make_weights(place)
                make_data(place)
            else:
                record = run(step, place, given.threads)
        except (OsoraError, RuntimeError) as error:
            sys.exit(str(error))
        if name == "weights" and name in there and not given.only:
            continue  # the weights exist, or are made again after a --clean
        record = {"schema": SCHEMA, "step": name, "threads": given.threads, "torch": torch.__version__, **record}
        with given.log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
    print(table(read_log(given.log)))


if __name__ == "__main__":
    main()
