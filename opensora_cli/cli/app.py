"""The `osora` command and its subcommands.

A command module imports nothing heavy at its top (no torch, no numpy, no pydantic): `osora --help` and shell completion
load all of them.
"""

import os
import sys
import warnings
from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Annotated, Any

import typer

import opensora_cli
from opensora_cli.cli import (
    bench_comm,
    bench_generate,
    ckpt,
    data,
    env_check,
    errors,
    generate,
    mem_profile,
    presets,
    show,
    train,
    vae,
)
from opensora_cli.cli.command import Group
from opensora_cli.cli.output import escape_foreign_texts, guard_streams
from opensora_cli.core.compiled_code import name_eager_cache

_COMMANDS = (
    generate.COMMAND,
    train.COMMAND,
    show.COMMAND,
    presets.COMMAND,
    env_check.COMMAND,
    mem_profile.COMMAND,
    bench_generate.COMMAND,
    bench_comm.COMMAND,
    ckpt.COMMAND,
    data.COMMAND,
    vae.COMMAND,
    ckpt.CONVERT,
)


class _Root(Group):
    """All commands; without arguments the help omits the options."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in _COMMANDS:
            self.add_command(command)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        options: list[Any] = self.params
        for option in options:
            option.hidden = not args
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="osora",
    cls=_Root,
    rich_markup_mode="rich",
    # errors.py reports errors; a bug keeps Python's own traceback.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"osora {opensora_cli.__version__}")
        raise typer.Exit


@app.callback()
def _osora(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run, train, measure and convert Open-Sora 2.0.

    Examples:

      osora generate "raining, sea"

      osora generate "the boat turns around" --ref boat.png --out boat.mp4

      osora train --config demo_lora
    """


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _wait_without_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep unless the user chose otherwise; torch reads the variable when it is loaded.

    Spinning threads take cores from all others: on two busy cores, layers of the demo model's size took 2.6 s with
    spinning threads and 0.4 s with sleeping ones.
    """
    if not any(environment.get(name) for name in _WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


@cache
def _command() -> Any:
    """Return the tree of commands."""
    return typer.main.get_command(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line, by default `sys.argv`, and return its exit code."""
    guard_streams()
    escape_foreign_texts()
    if "torch" not in sys.modules:
        _wait_without_spinning(os.environ)
    # Threads of tokenizers gain nothing on a few texts, and tokenizers aborts if none can be started (`ulimit -u`).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    name_eager_cache(os.environ)
    # Pillow warns of broken EXIF data; where it cannot read the pixels, it raises.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return errors.run(lambda: _command().main(args=args, prog_name="osora", standalone_mode=False))
