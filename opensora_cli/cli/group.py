"""Groups of commands, and help that reads well in 80 columns. This module imports no pydantic; see `cli.app`."""

import inspect
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

HELP = {"help_option_names": ["-h", "--help"]}
_EXAMPLES = "Examples:"


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
