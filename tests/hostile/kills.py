"""Commands that can be ended: what goes on after them, and what the next run must make of it."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hostile import judge
from hostile.inputs import BASES, Base, Inputs
from hostile.judge import Fault
from hostile.sandbox import Folder, Outcome, Sandbox
from safetensors.torch import load_file

Commands = Sequence[tuple[str, ...]]

OTHER_BYTES = judge.LOST
_GRACE_S = 60.0
_AGE_S = 600.0


@dataclass(frozen=True)
class Ended:
    """A command that can be ended: what goes on after it, and which of its results are always the same bytes."""

    base: Base
    go_on: Callable[[Folder, Base], Commands]
    results: Callable[[Path], Mapping[str, bytes]]


def run_again(folder: Folder, base: Base) -> Commands:
    """Return the same command."""
    return [base.argv]


def run_again_unless_done(folder: Folder, base: Base) -> Commands:
    """Return the same command, which may replace."""
    return [(*base.argv, "--overwrite")]


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
    """Return a base, with more words."""
    base = next(each for each in BASES if each.name == name)
    return Base(base.name, (*base.argv, *more), base.reads, base.replaces, seconds=base.seconds)


SHORT = ("--num-frames", "5", "--steps", "1")
_STEPS = ("loop.steps=2", "checkpoints.every=1", "checkpoints.keep=1", "precision.compute=fp32")
_EVERY_STEP = tuple(word for setting in _STEPS for word in ("--set", setting))
_WEIGHTS = "run/**/*.safetensors"

ENDED: tuple[Ended, ...] = (
    Ended(named("generate", *SHORT), generate_on, files_of("out.mp4")),
    Ended(named("generate gif", *SHORT), run_again, files_of("*.gif")),
    Ended(named("generate picture", "--steps", "1"), run_again, files_of("*.png")),
    Ended(named("train vae", *_EVERY_STEP), _train, files_of(_WEIGHTS)),
    Ended(named("train mmdit", *_EVERY_STEP), _train, files_of(_WEIGHTS)),
    Ended(named("cache"), run_again, _tensors("cache/*.safetensors")),
    Ended(
        Base("scan deep", ("data", "scan", "clips", "--out", "table.csv", "--deep"), ("clips",)),
        run_again_unless_done,
        files_of("table.csv"),
    ),
    Ended(named("scan again"), run_again, files_of("clips.csv")),
    Ended(named("shard"), run_again_unless_done, files_of("clips*.csv")),
    Ended(named("preview"), run_again_unless_done, files_of("*.png")),
    *(
        Ended(named(name), run_again_unless_done, files_of("out*/**/*") if " to " in name else files_of("out.*"))
        for name in (
            "convert torch-shards",
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
)


@dataclass
class Kills:
    """Runs commands that can be ended, and keeps the results of those that nothing ends."""

    sandbox: Sandbox
    inputs: Inputs
    _whole: dict[str, Mapping[str, bytes]] = field(default_factory=dict)

    def results_of(self, ended: Ended) -> Mapping[str, bytes]:
        """Return the results of a command that nothing ends, from which the warm process learns."""
        if ended.base.name not in self._whole:
            with self.sandbox.folder() as folder:
                self.inputs.put(ended.base, folder)
                outcome = self.run(ended.base.argv, folder, learn=True)
                assert outcome.code == 0, f"osora {' '.join(ended.base.argv)}: {outcome}\n{outcome.stderr}"
                self._whole[ended.base.name] = dict(ended.results(folder.work))
        return self._whole[ended.base.name]

    def run(
        self,
        argv: Sequence[str],
        folder: Folder,
        *,
        learn: bool = False,
        calls: Sequence[object] = (),
    ) -> Outcome:
        """Run a command, as `Sandbox.run` does."""
        self.sandbox.give_away(folder)
        return self.sandbox.run(
            argv,
            folder,
            learn=learn,
            calls=calls,
            grace_s=_GRACE_S,
            limit_s=300.0,
        )


def age(folder: Folder) -> None:
    """Let time pass for what is left under temporary names."""
    for path in folder.root.rglob("*"):
        if re.search(r"\.osora-.*\.tmp", str(path)):
            status = path.lstat()
            os.utime(path, (status.st_atime - _AGE_S, status.st_mtime - _AGE_S), follow_symlinks=False)


def faults_of_next(after: judge.Tree, results: Mapping[str, bytes], whole: Mapping[str, bytes]) -> list[Fault]:
    """Return what is wrong with what the next run leaves: left-overs, or results unlike the `whole` ones."""
    found = [Fault(judge.LEFT, path) for path in after if judge.is_unfinished(path) or path.startswith("tmp/")]
    for name in sorted(results.keys() | whole.keys()):
        if name not in results:
            found.append(Fault(judge.LOST, f"{name} is not there"))
        elif name not in whole:
            found.append(Fault(judge.LEFT, f"{name}, which an uninterrupted run does not make"))
        elif results[name] != whole[name]:
            found.append(Fault(OTHER_BYTES, f"{name} has other bytes than of an uninterrupted run"))
    return found
