"""The `osora` command, its subcommands and groups, and help that reads well in 80 columns.

The module of a command is imported when a command line names it. This module imports nothing heavy (no torch, no numpy,
no pydantic), since `osora --help` and shell completion load it.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Iterable, MutableMapping, Sequence
from functools import cache, partial
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import opensora_cli
from opensora_cli.cli import errors
from opensora_cli.cli.output import escape_foreign_texts, guard_streams
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.core.files import user_cache
from opensora_cli.core.signals import held_back

HELP = {"help_option_names": ["-h", "--help"]}
_EXAMPLES = "Examples:"
_VIDEOS, _TRAINING, _MACHINES = "Videos", "Training and weights", "Machines and measurements"

_COMMANDS: dict[str, tuple[str, str | None, str]] = {
    "generate": ("generate:COMMAND", _VIDEOS, "Make a video from a prompt, and from pictures or videos if given."),
    "serve": (
        "serve:COMMAND",
        _VIDEOS,
        "Serve a page and an API that make videos, with a queue that survives restarts.",
    ),
    "gallery": ("results:GALLERY", _VIDEOS, "Write one HTML page of a folder of results."),
    "show": (
        "results:SHOW",
        _VIDEOS,
        "Print prompt, seed, settings and timings of a result, or what a checkpoint holds.",
    ),
    "presets": ("results:PRESETS", _VIDEOS, "List the presets with size, needs, and the GPUs that they fit on."),
    "train": ("train:COMMAND", _TRAINING, "Train a part of the video model, or an adapter for it."),
    "data": ("data:COMMAND", _TRAINING, "Make, split, preview and encode tables of pictures and videos."),
    "ckpt": ("ckpt:COMMAND", _TRAINING, "Convert, inspect, verify, merge and download weights."),
    "vae": ("vae:COMMAND", _TRAINING, "Reconstruct pictures and videos with an autoencoder, and measure its latents."),
    "env-check": ("env_check:COMMAND", _MACHINES, "Check this machine and its environment variables."),
    "mem-profile": ("mem_profile:COMMAND", _MACHINES, "Show where the memory of a generation or a training goes."),
    "bench-generate": ("bench_generate:COMMAND", _MACHINES, "Time a video by stage, and compare settings."),
    "bench-comm": ("bench_comm:COMMAND", _MACHINES, "Measure how fast devices communicate."),
    "convert-ckpt": ("ckpt:CONVERT", None, "Convert weights, as osora ckpt convert does."),
}
"""Place, panel of the help (None hides it) and short help of each command."""


class Group(TyperGroup):
    """A group of commands; without arguments it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.help = unwrapped(self.help or "")
        hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


def make_group(name: str, about: str, *commands: TyperCommand) -> Group:
    return Group(name=name, help=about, commands=commands, context_settings=HELP)


def unwrapped(text: str) -> str:
    """Return a help text with a line for each paragraph, and below `Examples:` a line for each command, unindented."""
    about, heading, examples = inspect.cleandoc(text).partition(_EXAMPLES)
    paragraphs = [" ".join(paragraph.split()) for paragraph in about.split("\n\n") if paragraph.strip()]
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    if heading:
        paragraphs.append("\n".join([heading, *lines]))
    return "\n\n".join(paragraphs)


def hide_types(parameters: Iterable[Any]) -> None:
    """Keep the help text from naming the types of arguments, which are words, and of switches."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
        elif parameter.is_flag:
            parameter.metavar = ""


class _Root(Group):
    """All commands; without arguments the help omits the options."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, panel, about) in _COMMANDS.items():
            self._add(TyperCommand(name, help=about), panel)

    def _add(self, command: TyperCommand | Group, panel: str | None) -> None:
        command.rich_help_panel, command.hidden = panel, panel is None
        self.add_command(command)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line. Raises FileProblem if the working folder was deleted."""
        try:
            os.getcwd()
        except FileNotFoundError as error:
            raise FileProblem("the working folder no longer exists", hint="cd to a folder that does") from error
        options: list[Any] = self.params
        for option in options:
            option.hidden = not args
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.load(args[0])
        return super().resolve_command(ctx, args)

    def load(self, *names: str) -> None:
        """Import the modules of commands. A module that Ctrl-C interrupts would raise any error."""
        with held_back():
            for place, panel, _ in (_COMMANDS[name] for name in names if name in _COMMANDS):
                self._add(resolve_name(f"opensora_cli.cli.{place}"), panel)


# errors.py reports errors; a bug keeps Python's own traceback.
app = typer.Typer(
    name="osora", cls=_Root, rich_markup_mode="rich", pretty_exceptions_enable=False, context_settings=HELP
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"osora {opensora_cli.__version__}")
        raise typer.Exit


_ABOUT = """Run, train, measure and convert Open-Sora 2.0.

Examples:
  osora generate "raining, sea"
  osora generate "the boat turns around" --ref boat.png --out boat.mp4
  osora train --config demo_lora
"""
_VERSION = typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")


@app.callback(help=_ABOUT, epilog="Documentation: docs/index.md in the checkout of osora.")
def _osora(version: Annotated[bool, _VERSION] = False) -> None:
    """Take the options of `osora` itself."""


def _wait_without_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep unless the user chose otherwise; torch reads the variable when it is loaded.

    Spinning threads take cores from all others: 2.6 s instead of 0.4 s for small layers on two busy cores.
    """
    if not any(map(environment.get, ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"


@cache
def _root() -> Any:
    return typer.main.get_command(app)


def load_commands() -> Any:
    """Return the tree of all commands, with their modules imported."""
    _root().load(*_COMMANDS)
    return _root()


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line, by default `sys.argv`, and return its exit code."""
    guard_streams()
    escape_foreign_texts()
    if "torch" not in sys.modules:
        _wait_without_spinning(os.environ)
    # Threads of tokenizers gain nothing on a few texts, and tokenizers aborts if none can be started (`ulimit -u`).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("HF_ENDPOINT") == "":  # as docker compose sets it; huggingface_hub would ask no address
        del os.environ["HF_ENDPOINT"]
    # Kernels that torch compiles in eager mode if nvidia-cutlass-dsl is installed.
    if (kernels := user_cache("kernels")) is not None:
        os.environ.setdefault("QUACK_CACHE_DIR", str(kernels))
    # Pillow warns of broken EXIF data; where it cannot read the pixels, it raises.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return errors.run(partial(_root().main, args=args, prog_name="osora", standalone_mode=False))
