"""The `osora` command: its subcommands, and the one place where they start and end.

A command module imports nothing heavy at its top (no torch, no numpy): `osora --help` and shell
completion load all of them.
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
    train,
    vae,
)
from opensora_cli.cli.command import Command, Group
from opensora_cli.cli.streams import escape_foreign_texts, guard_streams
from opensora_cli.core.compiled_code import name_eager_cache

app = typer.Typer(
    name="osora",
    cls=Group,
    rich_markup_mode="rich",
    # errors.py reports errors; what is not ours keeps Python's own traceback.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("generate", cls=generate.GenerateCommand)(generate.generate)
app.command("train", cls=Command)(train.train)
app.command("env-check", cls=Command)(env_check.env_check)
app.command("mem-profile", cls=Command)(mem_profile.mem_profile)
app.command("bench-generate", cls=Command)(bench_generate.bench_generate)
app.command("bench-comm", cls=Command)(bench_comm.bench_comm)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(data.app, name="data")
app.add_typer(vae.app, name="vae")
app.command("convert-ckpt", cls=Command, help="The same as osora ckpt convert.")(ckpt.convert)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"osora {opensora_cli.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _osora(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run, train, measure and convert Open-Sora 2.0."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def _wait_without_spinning(environment: MutableMapping[str, str]) -> None:
    """Have threads of OpenMP sleep while they wait, unless the user chose how; it is read when torch is loaded.

    Spinning, they take their cores from all others, and from each other where these are busy: two threads on two busy
    cores took 2.6 s for layers of the demo model's size, and 0.4 s asleep.
    """
    if not any(environment.get(name) for name in _WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


def _silence_pillow() -> None:
    """Ignore its warnings, of broken EXIF data and the like: where it cannot read the pixels, it raises."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


@cache
def _command() -> Any:
    """Return all commands with their options, which take longer to make than many a request to refuse."""
    return typer.main.get_command(app)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; without `args` it is that of `sys.argv`."""
    guard_streams()
    escape_foreign_texts()
    if "torch" not in sys.modules:
        _wait_without_spinning(os.environ)
    # Its threads gain nothing on a few texts, and where none can be started (`ulimit -u`) it would abort.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    name_eager_cache(os.environ)
    _silence_pillow()
    return errors.run(lambda: _command().main(args=args, prog_name="osora", standalone_mode=False))
