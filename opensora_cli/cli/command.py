"""Commands and groups whose help reads well in 80 columns."""

from collections.abc import Iterable, Mapping
from enum import Enum
from inspect import cleandoc
from typing import Any

from typer.core import TyperCommand, TyperGroup

_EXAMPLES = "Examples:"
_DEFAULT = " Default: "
_WIDEST_CHOICES = 18


class Command(TyperCommand):
    """A command. Its help has no line breaks of the source, no type of switches, and the defaults."""

    def defaults(self) -> Mapping[str, str]:
        """Return what an option is without being given, where its help does not say so; by option, `--steps`.

        Called for help alone, so that nothing else waits for what it imports; it imports no torch.
        """
        return {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line; an error knows the command, whose help its hint names."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # of a value that is missing, Typer leaves it out
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.help = unwrapped(self.help or "")
        describe(self.get_params(ctx), self.defaults())
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands; its help is as that of `Command`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        for command in (self, *self.commands.values()):
            command.help = unwrapped(command.help or "")
        describe(self.get_params(ctx), {})
        super().format_help(ctx, formatter)


def unwrapped(text: str) -> str:
    """Return a help text with a line for each paragraph, and below `Examples:` a line for each command, unindented."""
    about, heading, examples = cleandoc(text).partition(_EXAMPLES)
    paragraphs = [" ".join(paragraph.split()) for paragraph in about.split("\n\n") if paragraph.strip()]
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return "\n\n".join([*paragraphs, *(["\n".join([heading, *lines])] if heading else [])])


def describe(parameters: Iterable[Any], defaults: Mapping[str, str]) -> None:
    """Complete the help of `parameters` in place: choices where they are many, and `defaults`, by option.

    What is complete stays as it is.
    """
    for parameter in parameters:
        is_option = parameter.param_type_name == "option"
        kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        about, _, default = (parameter.help or "").partition(_DEFAULT)
        if not is_option:
            parameter.display_type_rich = _no_type
        elif parameter.metavar is None and parameter.is_flag:
            parameter.metavar = ""
        elif parameter.metavar is None and isinstance(kind, type) and issubclass(kind, Enum):
            choices = [str(each.value) for each in kind]
            parameter.metavar = "|".join(choices)
            if len(parameter.metavar) > _WIDEST_CHOICES:
                parameter.metavar = "NAME"
                about += f" One of {', '.join(choices)}."
        known = next((f"{defaults[name]}." for name in parameter.opts if name in defaults), "")
        parameter.help = about + (f"{_DEFAULT}{default or known}" if default or known else "")


def _no_type(ctx: object) -> None:
    """Arguments are words; their type is not shown."""
