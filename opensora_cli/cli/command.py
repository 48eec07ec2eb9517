"""Commands that are built from rows of options, and the rows that several commands have."""

import glob
import inspect
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from opensora_cli.cli.call import VERBOSE, Call
from opensora_cli.cli.errors import interruptible
from opensora_cli.cli.group import HELP, hide_types, unwrapped
from opensora_cli.core import device_names
from opensora_cli.core.section import Section, alternatives, shown
from opensora_cli.settings.files import list_presets
from opensora_cli.settings.flags import MACHINE, OUTPUT, Option, given_by
from opensora_cli.settings.layers import Layer, validate

_ALL = "--help-all"
_WIDEST_CHOICES = 18
_EVERYTHING, _WORDS = "opensora_cli.everything", "opensora_cli.words"
"""Keys of a context: whether the help text has all options, and the words of the command line."""
_UNSET = re.compile(r"(.+\.) None(?: means|:) (.+)\.")
"""Description of a setting, and the meaning of None, which the help text shows as the default."""
_SETTINGS_FILES = (".json", ".py", ".yaml", ".yml")

_PRINTED = {
    "--json": Option(kind=bool, panel=OUTPUT, help="Print one JSON document to stdout."),
    "--quiet": Option(kind=bool, panel=OUTPUT, help="Print errors only.", short="-q"),
}
"""Options of printing, which every command has."""
ON = Option(kind=str, metavar="NxGPU|SIZE|FILE", help="With --dry-run: plan for other GPUs, as in 8xH100 or 12GiB.")
DEVICES = Option("parallel.devices", MACHINE, metavar="LIST", kind=str)


def completed_settings(*kinds: str) -> Callable[[str], list[str]]:
    """Return the shell completion of `--config`: packaged settings of these kinds by name, folders, and files."""

    def complete(incomplete: str) -> list[str]:
        names = [name for kind in kinds for name in list_presets(kind) if name.startswith(incomplete)]
        paths = [
            f"{path}/" if os.path.isdir(path) else path for path in sorted(glob.glob(f"{glob.escape(incomplete)}*"))
        ]
        return [*dict.fromkeys(names), *(path for path in paths if path.endswith(("/", *_SETTINGS_FILES)))]

    return complete


def config_row(about: str, *kinds: str) -> Option:
    """Return the row of `--config`, completed with packaged settings of these kinds."""
    return Option(kind=Path, metavar="NAME|FILE", help=about, complete=completed_settings(*kinds))


def set_row(about: str) -> Option:
    """Return the row of `--set`."""
    return Option(kind=list[str], metavar="KEY=VALUE", help=about)


def device_rows(prefix: str = "") -> dict[str, Option]:
    """Return the rows of device and threads, whose keys begin with `prefix`."""
    return {
        "--device": Option(f"{prefix}device", MACHINE, device_names.HELP, "DEVICE"),
        "--threads": Option(f"{prefix}threads", MACHINE, "CPU threads.", "N", default="by work and cores"),
    }


class Command(TyperCommand):
    """A command with rows of options; see `make_command`."""

    rows: Mapping[str, Option]
    fields: Mapping[str, Any]
    """Pydantic fields of the rows' settings; None for a row without a setting."""
    defaults: Callable[[], Mapping[str, str]]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line; an error names the command, whose help its hint names."""
        ctx.meta[_WORDS] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]  # Typer leaves it out for a missing value
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.describe(everything=_ALL not in self.rows or ctx.meta.get(_EVERYTHING, False))
        hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def describe(self, *, everything: bool = True) -> None:
        """Complete the help of all parameters: description, choices and default; `--help` shows the common ones."""
        defaults = self.defaults()
        parameters: list[Any] = self.params
        for parameter, (label, row) in zip(parameters, self.rows.items(), strict=True):
            field = self.fields[label]
            about, choices = row.help or field.description, _choices(row, field)
            own = None if field is None or field.is_required() else field.default
            default = row.default or defaults.get(label) or shown_default(own)
            if unset := _UNSET.fullmatch(about):
                about, default = unset[1], default or unset[2]
            if parameter.metavar == "NAME" and choices:
                about += f" One of {', '.join(choices)}."
            if get_origin(_kind(row, field)) is list and label.startswith("-"):
                about += " Repeatable."
            parameter.help = about + (f" Default: {default}." if default else "")
            parameter.hidden = not (everything or row.is_common)


def make_command(
    run: Callable[[Any, Call], None],
    rows: Mapping[str, Option],
    *,
    settings: type[Section] | None = None,
    name: str = "",
    on_ranks: bool = False,
    about: str = "",
    defaults: Callable[[], Mapping[str, str]] = dict,
) -> Command:
    """Build a command.

    Args:
        run: called with its settings and the call, which has all values. Its name and docstring are those of the
            command. If its first parameter is a `Layer`, it gets the given settings by key, else validated settings.
        rows: options and arguments by their typed form, in the order of the help text: `--num-frames`, or the metavar
            of an argument, `FILE`. Those of printing come last.
        settings: class of the settings that rows set, if `run` does not name it.
        name: name instead of that of `run`.
        on_ranks: whether torchrun or Slurm may start the command as one job, of which only the first rank reports.
        about: help text instead of the docstring.
        defaults: returns defaults for the help text by option; called for help alone.
    """
    more = {_ALL: Option(kind=bool, help="Show all options.", is_common=True)}
    rows = {**rows, **_PRINTED, **(more if any(row.is_common for row in rows.values()) else {})}
    taken = next(iter(inspect.signature(run).parameters.values())).annotation
    validated = taken if isinstance(taken, type) and issubclass(taken, Section) else None
    fields = {label: _field(row, validated or settings) for label, row in rows.items()}

    def call(ctx: typer.Context, **values: object) -> None:
        typed = {label: values[_name(label)] for label in rows}
        given = {
            label: value for label, value in typed.items() if value is not None and value is not False and value != []
        }
        layer: Layer = {}
        with interruptible():
            for label, value in given.items():
                if rows[label].key:
                    layer = {**layer, **given_by(rows[label], value, label)}
            words = (*ctx.command_path.split()[1:], *ctx.meta[_WORDS])
            run(
                layer if validated is None else validate(validated, layer),
                Call(words, given, on_ranks=on_ranks, is_brief=VERBOSE in rows),
            )

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [_parameter(label, row, fields[label]) for label, row in rows.items()]
    call.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]  # what Typer reads
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    name, about = name or run.__name__.replace("_", "-"), unwrapped(about or run.__doc__ or "")
    single.command(name, cls=Command, help=about, context_settings=HELP)(call)
    command = typer.main.get_command(single)
    assert isinstance(command, Command)
    command.rows, command.fields, command.defaults = rows, fields, defaults
    return command


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[_EVERYTHING] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _name(label: str) -> str:
    """Return the name of a parameter: `num_frames_` for `--num-frames`, since `from` and `list` are taken."""
    return f"{label.lstrip('-').replace('-', '_').lower()}_"


def _parameter(label: str, row: Option, field: Any) -> inspect.Parameter:
    kind, choices = _kind(row, field), _choices(row, field)
    complete = row.complete or (lambda incomplete: [each for each in choices if each.startswith(incomplete)])
    extra: dict[str, Any] = {"metavar": row.metavar or _metavar(row, field), "autocompletion": complete}
    if row.panel:
        extra["rich_help_panel"] = row.panel
    if not label.startswith("-"):
        info: Any = typer.Argument(**{**extra, "metavar": label}, show_default=False)
    elif label == _ALL:
        info = typer.Option(label, is_eager=True, callback=_show_all, metavar="")
    else:
        info = typer.Option(label, *row.short.split(), show_default=False, **extra)
    is_required = field is not None and field.is_required()
    default: Any = False if kind is bool else None
    if is_required:
        default = inspect.Parameter.empty
    annotation: Any = kind if is_required or kind is bool else kind | None
    return inspect.Parameter(
        _name(label), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


def _field(row: Option, schema: Any) -> Any:
    """Return the pydantic field of a row's setting; None for a row without a setting."""
    if not row.key or schema is None:
        return None
    *sections, name = row.key.split(".")
    for section in sections:
        schema = schema.model_fields[section].annotation
    return schema.model_fields[name]


def _type(row: Option, field: Any) -> Any:
    """Return the type of a value; text if there are several."""
    if row.kind is not None or field is None:
        return row.kind or str
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    kind = kinds[0] if len(kinds) == 1 else str
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _kind(row: Option, field: Any) -> Any:
    """Return the type of a value on the command line. Numbers and choices are text, which pydantic reads."""
    kind = _type(row, field)
    if field is None or kind is bool:
        return kind
    return list[str] if get_origin(kind) is tuple else str


def _choices(row: Option, field: Any) -> list[str]:
    kind = _type(row, field)
    return [str(each.value) for each in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _metavar(row: Option, field: Any) -> str | None:
    choices, kind = "|".join(_choices(row, field)), _type(row, field)
    if choices:
        return choices if len(choices) <= _WIDEST_CHOICES else "NAME"
    return {bool: "", int: "N", float: "X"}.get(kind)


def shown_default(value: object) -> str:
    """Return a value as it can be typed; empty if a help text does not show it."""
    return "" if value is None or isinstance(value, bool | tuple) else shown(value)
