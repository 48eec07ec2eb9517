"""Commands that are built from rows of options, and help that reads well in 80 columns."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from pkgutil import resolve_name
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from opensora_cli.cli.call import Call
from opensora_cli.cli.errors import interruptible
from opensora_cli.cli.options import PRINTED
from opensora_cli.settings.flags import Option, given_by

_ALL = "--help-all"
_EXAMPLES = "Examples:"
_WIDEST_CHOICES = 18
_EVERYTHING, _WORDS = "opensora_cli.everything", "opensora_cli.words"
"""Keys of a context: whether the help text has all options, and the words of the command line."""
_HELP = {"help_option_names": ["-h", "--help"]}
_UNSET = re.compile(r"(.+\.) None(?: means|:) (.+)\.")
"""Description of a setting, and the meaning of None, which the help text shows as the default."""


class Command(TyperCommand):
    """A command whose parameters are built from rows when they are first needed: their types come from settings.

    Args:
        run: called with the validated settings, or with the given ones by key (see `layers.Layer`) if `layered`, and
            with the call, which has all values. Its docstring is the help text.
        rows: options and arguments by their typed form, in the order of the help text: `--num-frames`, or the metavar
            of an argument, `FILE`. The rows of `PRINTED` come last.
        settings: `module:Class` of the settings that rows set, below `opensora_cli.settings`.
        layered: whether files or other options set them, too.
        on_ranks: whether torchrun or Slurm may start the command as one job, of which only the first rank reports.
        defaults: returns defaults for the help text by option; called for help alone.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Any, Call], None],
        rows: Mapping[str, Option],
        *,
        settings: str = "",
        layered: bool = False,
        on_ranks: bool = False,
        about: str = "",
        defaults: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._run, self._settings, self._layered, self._defaults = run, settings, layered, defaults
        self._on_ranks = on_ranks
        self._has_all = any(row.is_common for row in rows.values())
        more = {_ALL: Option(kind=bool, help="Show all options.", is_common=True)} if self._has_all else {}
        self._rows = {**rows, **PRINTED, **more}
        help_text = unwrapped(about or run.__doc__ or "")
        super().__init__(name, help=help_text, context_settings=_HELP, rich_markup_mode="rich")

    @property
    def params(self) -> list[Any]:
        """Options and arguments."""
        parameters: list[Any] = self._built.params
        return parameters

    @params.setter
    def params(self, value: object) -> None:
        """Ignore the empty list of the base class."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line; an error names the command, whose help its hint names."""
        ctx.meta[_WORDS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # Typer leaves it out for a missing value
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        return self._built.invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.describe(everything=not self._has_all or ctx.meta.get(_EVERYTHING, False))
        _hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def describe(self, *, everything: bool = True) -> None:
        """Complete the help of all parameters: description, choices and default; `--help` shows the common ones."""
        defaults = self._defaults()
        for parameter, (label, row) in zip(self.params, self._rows.items(), strict=True):
            field = self._field(row)
            about, kind = row.help or field.description, _kind(row, field)
            default = row.default or defaults.get(label) or _shown(field)
            if unset := _UNSET.fullmatch(about):
                about, default = unset[1], default or unset[2]
            if parameter.metavar == "NAME" and _is_enum(kind):
                about += f" One of {', '.join(kind)}."
            parameter.help = about + (f" Default: {default}." if default else "")
            parameter.hidden = not (everything or row.is_common)

    @cached_property
    def _built(self) -> Any:
        """Command that Typer makes from a function with these parameters."""
        single = typer.Typer(add_completion=False)
        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [self._parameter(label, row) for label, row in self._rows.items()]

        def call(ctx: typer.Context, **values: object) -> None:
            given = {
                label: value
                for label in self._rows
                if (value := values[_name(label)]) is not None and value is not False and value != []
            }
            with interruptible():
                words = (*ctx.command_path.split()[1:], *ctx.meta[_WORDS])
                self._call(Call(words, given, on_ranks=self._on_ranks))

        call.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]  # what Typer reads
        single.command()(call)
        return typer.main.get_command(single)

    def _call(self, call: Call) -> None:
        settings: Any = {}
        for label, value in call.given.items():
            if self._rows[label].key:
                settings |= given_by(self._rows[label], value, label)
        if not self._layered:
            from opensora_cli.settings.layers import validate

            settings = validate(self._schema, settings)
        self._run(settings, call)

    @property
    def _schema(self) -> Any:
        return resolve_name(f"opensora_cli.settings.{self._settings}")

    def _parameter(self, label: str, row: Option) -> inspect.Parameter:
        field = self._field(row)
        kind: Any = _kind(row, field)
        extra: dict[str, Any] = {"metavar": row.metavar or _metavar(kind), "autocompletion": row.complete}
        if row.panel:
            extra["rich_help_panel"] = row.panel
        if not label.startswith("-"):
            info: Any = typer.Argument(**{**extra, "metavar": label}, show_default=False)
        elif label == _ALL:
            info = typer.Option(label, is_eager=True, callback=_show_all, metavar="")
        else:
            info = typer.Option(label, *row.short.split(), show_default=False, **extra)
        is_required = field is not None and field.is_required()
        default = inspect.Parameter.empty if is_required else False if kind is bool else None
        annotation: Any = kind if is_required or kind is bool else kind | None
        return inspect.Parameter(
            _name(label), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
        )

    def _field(self, row: Option) -> Any:
        """Return the pydantic field of a row's setting; None for a row without a setting."""
        if not row.key or not self._settings:
            return None
        from opensora_cli.core.section import alternatives

        *sections, name = row.key.split(".")
        schema = self._schema
        for section in sections:
            # One of the alternatives of an optional section is None.
            schema = next(
                kind for kind in alternatives(schema.model_fields[section].annotation) if kind is not NoneType
            )
        return schema.model_fields[name]


class Group(TyperGroup):
    """A group of commands; without arguments it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.help = unwrapped(self.help or "")
        _hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)


def group(name: str, about: str, *commands: Command) -> Group:
    """Return a group of commands."""
    return Group(name=name, help=about, commands=commands, context_settings=_HELP)


def unwrapped(text: str) -> str:
    """Return a help text with a line for each paragraph, and below `Examples:` a line for each command, unindented."""
    about, heading, examples = inspect.cleandoc(text).partition(_EXAMPLES)
    paragraphs = [" ".join(paragraph.split()) for paragraph in about.split("\n\n") if paragraph.strip()]
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    return "\n\n".join([*paragraphs, *(["\n".join([heading, *lines])] if heading else [])])


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_EVERYTHING] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _name(label: str) -> str:
    """Return the name of a parameter: `num_frames_` for `--num-frames`, since `from` and `list` are taken."""
    return f"{label.lstrip('-').replace('-', '_').lower()}_"


def _kind(row: Option, field: Any) -> Any:
    """Return the type of a value on the command line; text where pydantic reads more than one type."""
    if row.kind is not None or field is None:
        return row.kind or str
    from pydantic import BeforeValidator

    from opensora_cli.core.section import alternatives

    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    kind: Any = kinds[0] if len(kinds) == 1 else str
    read_by = [*field.metadata, *getattr(kind, "__metadata__", ())]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        [part, *_] = get_args(kind)
        return list[part if _is_enum(part) else str]  # type: ignore[misc]  # a type that only Typer sees
    is_plain = kind in (bool, int, float) or _is_enum(kind)
    return kind if is_plain and not any(isinstance(each, BeforeValidator) for each in read_by) else str


def _is_enum(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _metavar(kind: Any) -> str | None:
    if kind is bool:
        return ""
    if kind is int:
        return "N"
    if not _is_enum(kind):
        return None
    choices = "|".join(str(each.value) for each in kind)
    return choices if len(choices) <= _WIDEST_CHOICES else "NAME"


def _shown(field: Any) -> str:
    """Return the default of a field for the help text; empty for no default."""
    default = None if field is None or field.is_required() else field.default
    return "" if default is None or isinstance(default, bool | tuple) or default == "" else f"{default}"


def _hide_types(parameters: Iterable[Any]) -> None:
    """Keep the help text from naming the types of arguments, which are words, and of switches."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
        elif parameter.is_flag:
            parameter.metavar = ""
