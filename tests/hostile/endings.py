"""Commands that can be ended: what goes on after them, and which of their results are always the same."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hostile.inputs import BASES, Base
from hostile.sandbox import Folder
from safetensors.torch import load_file

Commands = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Ended:
    """A command that can be ended: what goes on after it, and which of its results are always the same bytes."""

    base: Base
    go_on: Callable[[Folder, Base], Commands]
    results: Callable[[Path], Mapping[str, bytes]]


def run_again(folder: Folder, base: Base) -> Commands:
    return [base.argv]


def run_again_unless_done(folder: Folder, base: Base) -> Commands:
    return [elsewhere(base) if (folder.work / "out").is_dir() else (*base.argv, "--overwrite")]


def elsewhere(base: Base) -> tuple[str, ...]:
    """Return a conversion to another folder, since a folder of weights is never replaced."""
    return tuple("other" if word == "out" else word for word in base.argv)


def generate_on(folder: Folder, base: Base) -> Commands:
    """Return what goes on from latents that are kept, and the same command."""
    kept = sorted(folder.work.glob("*.latents.safetensors"))
    return [*(("generate", "--from-latents", each.name, "--weights", "tiny") for each in kept), base.argv]


def _train(folder: Folder, base: Base) -> Commands:
    run = folder.work / "run"
    if any(run.glob("[!.]*/running_states.json")):
        return [(*base.argv, "--resume")]
    return [(*base.argv, "--overwrite")] if run.exists() else [base.argv]


def files_of(pattern: str) -> Callable[[Path], Mapping[str, bytes]]:
    """Return what reads all files of a pattern, in which the folder has no name."""
    return lambda work: {
        str(path.relative_to(work)): path.read_bytes().replace(os.fsencode(work), b"")
        for path in sorted(work.glob(pattern))
        if path.is_file()
    }


def _tensors(pattern: str) -> Callable[[Path], Mapping[str, bytes]]:
    """Return what reads all tensors in files of a pattern, in an order of their own.

    How they are spread over files may differ, and their names have digests of paths.
    """
    return lambda work: {
        str(number): content
        for number, content in enumerate(
            sorted(
                name.rpartition(".")[2].encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                for path in work.glob(pattern)
                for name, tensor in load_file(path).items()
            )
        )
    }


def named(name: str, *more: str) -> Base:
    base = next(each for each in BASES if each.name == name)
    return Base(base.name, (*base.argv, *more), base.reads, base.replaces, seconds=base.seconds)


SHORT = ("--num-frames", "5", "--steps", "1")
_STEPS = ("loop.steps=2", "checkpoints.every=1", "checkpoints.keep=1", "precision.compute=fp32")
_EVERY_STEP = tuple(word for setting in _STEPS for word in ("--set", setting))
_WEIGHTS = "run/**/*.safetensors"

_LAST = "--save-last-frame"
_TINY = ("generate", "raining sea", "--config", "generate.yaml", *SHORT)
_MADE = ("made.mp4", "made.mp4.json")
_PROMPTS = ("generate", "--config", "generate.yaml", "--prompts", "prompts.csv", "--out", "videos", *SHORT)
_OVER = ("--seed", "7", "--overwrite")


def _generated(about: str, *words: str, replaces: tuple[str, ...] = ()) -> Base:
    reads = ("generate.yaml", "tiny", *replaces)
    return Base(f"generate {about}", (*_TINY, *words), reads, tuple(f"work/{name}" for name in replaces))


ENDED: tuple[Ended, ...] = (
    Ended(named("generate", *SHORT), generate_on, files_of("out.mp4")),
    Ended(named("generate gif", *SHORT), run_again, files_of("*.gif")),
    Ended(named("generate picture", "--steps", "1"), run_again, files_of("*.png")),
    Ended(named("train vae", *_EVERY_STEP), _train, files_of(_WEIGHTS)),
    Ended(named("train mmdit", *_EVERY_STEP), _train, files_of(_WEIGHTS)),
    Ended(named("cache"), run_again, _tensors("cache/*.safetensors")),
    Ended(named("scan"), run_again_unless_done, files_of("table.csv")),
    Ended(named("scan again"), run_again, files_of("clips.csv")),
    Ended(named("shard"), run_again_unless_done, files_of("clips*.csv")),
    *(
        Ended(named(name), run_again_unless_done, files_of("out*/**/*") if " to " in name else files_of("out.*"))
        for name in (
            "convert shards",
            "convert dcp",
            "convert to safetensors-shards",
            "convert to dcp",
            "convert to colossalai",
            "merge",
        )
    ),
    Ended(
        Base("reconstruct", ("vae", "reconstruct", "made.mp4", "picture.png"), ("made.mp4", "picture.png")),
        run_again_unless_done,
        files_of("**/*_reconstructed.*[4g]"),
    ),
    Ended(
        _generated("over, with its last frame", "--out", "made.mp4", _LAST, *_OVER, replaces=_MADE),
        run_again,
        files_of("made.*[4g]"),
    ),
    Ended(
        _generated("over pictures", "--out", "many.png", *_OVER, replaces=("many", "many.json")),
        run_again,
        files_of("many/*.png"),
    ),
    Ended(_generated("with previews", "--out", "out.gif", "--preview-every", "1"), run_again, files_of("out.*f")),
    Ended(Base("generate many", _PROMPTS, ("generate.yaml", "tiny", "prompts.csv")), run_again, files_of("*/*.mp4")),
    Ended(named("generate from latents"), run_again, files_of("out.mp4")),
    Ended(named("cache filled"), run_again, files_of("*.csv")),
    *(
        Ended(named(name), run_again_unless_done, files_of(pattern))
        for name, pattern in (("convert to torch", "out"), ("convert run", "out.*"), ("profile training", "memory.png"))
    ),
)
"""Commands that are ended, or of which a call fails."""
