"""Command lines from the application's own list of commands, and valid ones that were changed."""

import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args

from hostile.inputs import BASES, Base, Inputs
from hostile.sandbox import Folder
from hostile.trial import Case
from hostile.values import PATHS, close_obstacles, hostile_value, put_obstacles
from pydantic import BaseModel

from opensora_cli.cli.app import load_commands
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.train import TrainSettings

_NEW_RANKS = ("--gpus", "--devices", "parallel.gpus", "parallel.devices", "parallel.nproc_per_node")
_FEW_RANKS = ("", "0", "-1", "1", "x", "1e9x", "0,0", "9" * 25, "nan")
_LONG = ("--compare", "--adaptive-batch")
"""Flags that measure for most of a minute."""
_SERVED_S = 20.0
"""Seconds after which a server is ended."""
_VARIABLES = (
    *("OSORA_WEIGHTS", "OSORA_SAMPLING__SEED", "OSORA_VIDEO__WIDTH", "OSORA_X", "OSORA_LOOP__STEPS", "HF_HOME", "HOME"),
    *("TMPDIR", "LANG", "COLUMNS", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"),
    *("SLURM_PROCID", "SLURM_NTASKS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NO_COLOR", "XDG_CACHE_HOME"),
)


@dataclass(frozen=True)
class _Parameter:
    """An argument (no names) or an option of a command."""

    names: tuple[str, ...]
    is_flag: bool
    choices: tuple[str, ...]


@cache
def _commands() -> tuple[tuple[tuple[str, ...], tuple[_Parameter, ...]], ...]:
    return tuple(_walk(load_commands(), ()))


def _walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple[_Parameter, ...]]]:
    yield words, tuple(map(_parameter, command.params))
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, (*words, name))


def _parameter(parameter: Any) -> _Parameter:
    names = tuple(parameter.opts) if parameter.param_type_name == "option" else ()
    kind = parameter.type_descriptor.annotation
    choices = tuple(str(each.value) for each in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()
    return _Parameter(names, getattr(parameter, "is_flag", False), choices)


@cache
def settings_names() -> tuple[str, ...]:
    return tuple(sorted({*_keys(GenerateSettings), *_keys(TrainSettings)}))


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")


def command_line(number: int, inputs: Inputs) -> Case:
    """Return the case of a number: most are put together anew, the others are valid ones with some changes."""
    rng = random.Random(number)
    base = None
    argv = _anew(rng)
    if rng.random() < 0.3:
        base = rng.choices(BASES, [1 / each.seconds for each in BASES])[0]
        argv = _changed(base.argv, rng)
    environment = {rng.choice(_VARIABLES): _clean(hostile_value(rng))} if rng.random() < 0.1 else {}
    return _case(f"command {number}", argv, base, inputs, environment)


def _case(name: str, argv: Sequence[str], base: Base | None, inputs: Inputs, environment: dict[str, str]) -> Case:
    def prepare(folder: Folder) -> None:
        put_obstacles(folder)
        if base is not None:
            inputs.put(base, folder)

    replaces = base.replaces if base is not None else ()
    return Case(
        name,
        tuple(map(_clean, argv)),
        prepare=prepare,
        close=close_obstacles,
        environment=environment,
        signals=((_SERVED_S, signal.SIGTERM),) if "serve" in argv else (),
        # What a changed line names as the place of its results is its own to replace.
        may_change=("work",) if "--overwrite" in argv else replaces,
        may_keep=("home/",) if "--install-completion" in argv else (),
    )


def _clean(word: str) -> str:
    return word.replace("\0", "")  # the system takes no word with one


def _anew(rng: random.Random) -> list[str]:
    words, parameters = rng.choice(_commands())
    argv = list(words)
    for parameter in rng.sample(parameters, min(len(parameters), rng.choice((0, 1, 1, 2, 2, 3, 5)))):
        argv += _given(parameter, rng)
    for parameter in parameters:
        if not parameter.names and rng.random() < 0.7:
            argv.append(rng.choice(PATHS) if rng.random() < 0.6 else hostile_value(rng))
    if rng.random() < 0.2:
        argv.insert(rng.randrange(len(argv) + 1), hostile_value(rng))
    return _with_little_to_do(argv, rng)


def _given(parameter: _Parameter, rng: random.Random) -> list[str]:
    if not parameter.names:
        return [hostile_value(rng)]
    name = rng.choice(parameter.names)
    if parameter.is_flag:
        return [name]
    if name == "--snapshot":  # written under whatever ending
        return [name, rng.choice(("gone", "gone/deeper", "folder", "denied/x", "/dev/full", "fifo", "loop", "x" * 300))]
    if name == "--set":
        return [name, f"{rng.choice(settings_names())}={hostile_value(rng)}"]
    value = rng.choice(parameter.choices) if parameter.choices and rng.random() < 0.5 else hostile_value(rng)
    return [f"{name}={value}"] if rng.random() < 0.2 else [name, value]


def _changed(argv: Sequence[str], rng: random.Random) -> list[str]:
    changed = list(argv)
    words = 2 if argv[0] in ("ckpt", "data", "vae") else 1
    parameters = next(found for name, found in _commands() if name == tuple(argv[:words]))
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(words, len(changed)) if len(changed) > words else words
        kind = rng.randrange(7)
        if kind == 0 and place < len(changed):
            del changed[place]
        elif kind == 1 and place < len(changed):
            changed[place] = hostile_value(rng)
        elif kind == 2 and place < len(changed):
            changed.insert(place, changed[place])
        elif kind == 3 and place < len(changed):
            changed[place] = _misspelt(changed[place], rng)
        elif kind == 4:
            changed += ["--set", f"{rng.choice(settings_names())}={hostile_value(rng)}"]
        else:
            changed[words:words] = _given(rng.choice(parameters), rng)
    return _with_little_to_do(changed, rng)


def _misspelt(word: str, rng: random.Random) -> str:
    place = rng.randrange(len(word) + 1)
    return word[:place] + rng.choice(("", "x", "-", "=", "é", " ")) + word[place + 1 :]


def _with_little_to_do(argv: list[str], rng: random.Random) -> list[str]:
    """Start no ranks and make no slow videos, which take many seconds: ranks have cases of their own."""
    argv = [word for word in argv if word not in _LONG]
    for place, word in enumerate(argv):
        name, is_given, _ = word.partition("=")
        if name.startswith(_NEW_RANKS):
            if is_given:
                argv[place] = f"{name}={rng.choice(_FEW_RANKS)}"
            elif place + 1 < len(argv):
                argv[place + 1] = rng.choice(_FEW_RANKS)
    # Without a number of ranks these start two.
    if argv[:1] in (["bench-comm"], ["env-check"]) and "--help" not in argv:
        argv += ["--gpus", "1"] if argv[0] == "bench-comm" else ["--no-all-reduce"]
    # Of a whole video it makes several.
    if argv[:1] == ["bench-generate"] and "--help" not in argv:
        argv += ["--steps", "1", "--num-frames", "1"]
    # A CPU without float16 takes minutes for a whole one.
    if argv[:1] == ["generate"] and {"float16", "--dtype=float16"} & {*argv} and "--help" not in argv:
        argv += ["--num-frames", "1"]
    return argv
