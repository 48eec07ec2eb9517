"""A save that is killed leaves what was there before or all of the new, and nothing else at any step."""

import json
import shutil
import sys
from pathlib import Path

import killing
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.checkpoint.readable import sha256_of
from opensora_cli.checkpoint.writing import write_checkpoint
from opensora_cli.community.checkpoint import CheckpointIO
from opensora_cli.core.choices import Format
from opensora_cli.engine.ckpt.convert import convert
from opensora_cli.settings.ckpt import ConvertSettings

NAME = "epoch0-global_step0"


def tensors(value: float) -> dict[str, Tensor]:
    return {f"layer.{index}": torch.full((50, 10), value) for index in range(3)}


def save_format(format: Format, target: Path, value: float) -> None:
    entries = {name: LazyTensor.of(tensor) for name, tensor in tensors(value).items()}
    # What must not be replaced comes to its name in another way.
    options = {"shard_bytes": 2500, "hash_each": lambda files: [*map(sha256_of, files)], "overwrite": target.exists()}
    write_checkpoint(entries, target, format=format, **options)


def save_training(target: Path, value: float) -> None:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value)
    with CheckpointIO() as io:
        assert io.save(None, target.parent, model, ema=model, optimizer=optimizer) == str(target)


def save_conversion(target: Path, value: float) -> None:
    source = target.parents[1] / f"{value}.safetensors"
    if not source.exists():
        save_file(tensors(value), source)
    convert(ConvertSettings(source=str(source), target=str(target), dtype="bf16", overwrite=True))


SAVES = {format.value: lambda *given, format=format: save_format(format, *given) for format in Format}
SAVES |= {"training": save_training, "conversion": save_conversion}


def outcomes(folder: Path, name: str, *, over: str, stride: int) -> list[str]:
    """Return what was there after each death of a save over an older one, or over nothing."""
    target, kept, states = folder / "work" / NAME, folder / "kept", {"nothing": None}

    def prepare() -> None:
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir() if over == "nothing" else shutil.copytree(kept, target.parent)

    def check() -> None:
        found.append(next((state for state, tree in states.items() if tree == killing.tree(target)), "broken"))
        assert all(path == target or path.name.startswith(".") for path in target.parent.iterdir())
        assert sources == {path: killing.tree(path) for path in sources}

    target.parent.mkdir(parents=True)
    for state, value in (("old", 1.0), ("new", 2.0)):
        SAVES[name](target, value)
        assert all((entry.read() == value).all() for entry in open_checkpoint(target).entries.values())
        states[state] = killing.tree(target)
        if state == "old":
            shutil.copytree(target.parent, kept)
    found: list[str] = []
    sources = {path: killing.tree(path) for path in folder.glob("*.safetensors")}
    killing.kill_at_every_step(prepare, lambda: SAVES[name](target, 2.0), check, stride=stride)
    shutil.rmtree(folder)
    return found


def check_kills(folder: Path, cases: list[str], *, stride: int) -> None:
    report = killing.run_script(__file__, folder, stride, *cases)
    assert len(report) == len(cases)
    for what, found in report.items():
        before = what.split(" over ")[1]
        # First what was there before, from one step on the new.
        assert found == [before] * found.count(before) + ["new"] * found.count("new"), what
        assert found.count(before) > 5 / stride, what
        assert found.count("new") >= 1, what


@pytest.mark.slow
def test_saves_killed_at_every_step(tmp_path: Path) -> None:
    check_kills(tmp_path, [f"{name} over {over}" for name in SAVES for over in ("old", "nothing")], stride=1)


if __name__ == "__main__":
    folder, stride, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    report = {}
    for case in cases:
        name, over = case.split(" over ")
        report[case] = outcomes(Path(folder) / name, name, over=over, stride=int(stride))
    print(json.dumps(report))
