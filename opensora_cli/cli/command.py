"""Commands that are built from rows of options, the rows that several commands have, and one call of a command."""

import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from opensora_cli.cli import output
from opensora_cli.cli.app import HELP, hide_types, unwrapped
from opensora_cli.cli.errors import interruptible
from opensora_cli.core import device_names
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext, find_context
from opensora_cli.core.section import Section, alternatives, shown
from opensora_cli.core.signals import held_back
from opensora_cli.settings.flags import MACHINE, OUTPUT, Option, given_by, option_of
from opensora_cli.settings.hardware import PlannedMachine, read_machine
from opensora_cli.settings.layers import Layer, validate

if TYPE_CHECKING:
    from opensora_cli.core.documents import Document

T = TypeVar("T")

VERBOSE = "--verbose"
_ALL = "--help-all"
_WIDEST_CHOICES = 18
_EVERYTHING, _WORDS = "opensora_cli.everything", "opensora_cli.words"
"""Keys of a context: whether the help text has all options, and the words of the command line."""
_UNSET = re.compile(r"(.+\.) None(?: means|:) (.+)\.")
"""Description of a setting, and the meaning of None, which the help text shows as the default."""

_PRINTED = {
    "--json": Option(kind=bool, panel=OUTPUT, help="Print one JSON document to stdout."),
    "--quiet": Option(kind=bool, panel=OUTPUT, help="Print errors only.", short="-q"),
}
"""Options of printing, which every command has."""
ON = Option(kind=str, metavar="NxGPU|SIZE", help="With --dry-run: plan for other GPUs, as in 8xH100 or 12GiB.")
CONFIG = Option(kind=Path, metavar="NAME|FILE")
SET = Option(kind=list[str], metavar="KEY=VALUE")
DEVICES = Option("parallel.devices", MACHINE, metavar="LIST", kind=str)


@dataclass(frozen=True)
class Call:
    """One call of a command: its command line and its results."""

    words: tuple[str, ...]
    """Command line without the name of the program."""
    given: Mapping[str, object]
    """Values of the given options and arguments by their typed form, `--steps` or `PROMPT`."""
    on_ranks: bool = False
    """Whether the ranks of a job run the command together. Otherwise each of them prints, as in `srun osora show`."""
    is_brief: bool = False
    """Whether details are shown with --verbose alone."""

    def value(self, label: str, kind: type[T]) -> T | None:
        """Return the value of an option without a setting; None if it was not given."""
        value = self.given.get(label)
        assert value is None or isinstance(value, kind), label
        return value

    @property
    def assignments(self) -> list[str]:
        return self.value("--set", list) or []

    @property
    def config(self) -> Path | None:
        return self.value("--config", Path)

    @property
    def as_json(self) -> bool:
        return "--json" in self.given

    @property
    def planned(self) -> PlannedMachine | None:
        """Machine of `--on`. Raises RequestError if there is no such machine."""
        name = self.value("--on", str)
        return None if name is None else read_machine(name)

    @cached_property
    def context(self) -> RankContext | None:
        """This process among the ranks that run the command together. None: it runs alone."""
        return find_context(os.environ) if self.on_ranks else None

    @property
    def is_main(self) -> bool:
        """Whether this process prints results and progress."""
        return self.context is None or self.context.is_main

    @cached_property
    def reporter(self) -> Reporter:
        """Reporter of progress and messages."""
        quiet = "--quiet" in self.given or not self.is_main
        return output.make_reporter(quiet=quiet, is_brief=self.is_brief and VERBOSE not in self.given)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Import torch and the engine inside the block; report on a terminal that this takes seconds."""
        if "torch" not in sys.modules and sys.stderr is not None and sys.stderr.isatty():
            self.reporter.note("loading torch ...")
        with importing():
            yield

    def show(self, result: "Document | None") -> None:
        """Print a result, and raise the error for its problems. None stands for a result that a rank has printed.

        All ranks raise, so that they end with the same exit code.
        """
        if result is None:
            return
        if self.is_main:
            output.print_result(result, as_json=self.as_json, is_quiet="--quiet" in self.given)
        result.raise_for_problems()

    def again(self, *labels: str) -> list[str]:
        """Return the given options of `labels` and those of printing, as words of a rank's command line."""
        words: list[str] = []
        for label in (*labels, "--json", "--quiet", VERBOSE):
            value = self.given.get(label, [])
            values = value if isinstance(value, list) else [value]
            words += [label if each is True else f"{label}={each}" for each in values]
        return words

    def refuse(self, labels: Container[str], *, beside: str, hint: str = "drop one of them") -> None:
        """Raise RequestError if one of the options `labels`, which have no effect with `beside`, was given."""
        if clash := next((label for label in self.given if label in labels), None):
            raise RequestError(f"{clash} has no effect with {beside}", hint=hint)

    def require(self, label: str, *, beside: str) -> None:
        """Raise RequestError if the option `beside` was given without `label`, which `beside` needs."""
        if beside in self.given and label not in self.given:
            raise RequestError(f"{beside} has no effect without {label}: give both, or none")


@contextmanager
def importing() -> Iterator[None]:
    """Hold back Ctrl-C while torch and the modules that need it are imported: interrupted, an import can abort.

    The objects of torch stay, so garbage collection is off meanwhile and ignores them afterwards: scanning them takes a
    tenth of a second each time. From then on, log messages of libraries are escaped.
    """
    is_first = "torch" not in sys.modules
    output.escape_foreign_logs()
    if is_first:
        gc.disable()
    try:
        with held_back():
            yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()


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
        self.describe(everything=_ALL not in self.rows or ctx.meta.get(_EVERYTHING, False))
        hide_types(self.get_params(ctx))
        super().format_help(ctx, formatter)

    def describe(self, *, everything: bool = True) -> None:
        """Complete the help of all parameters: description, choices and default; `--help` shows the common ones."""
        defaults = self.defaults()
        parameters: list[Any] = self.params
        for parameter, (label, row) in zip(parameters, self.rows.items(), strict=True):
            field = self.fields[label]
            kind, choices, _ = _value(row, field)
            about = row.help or field.description
            own = None if field is None or field.is_required() else field.default
            default = row.default or defaults.get(label) or shown_default(own)
            if unset := _UNSET.fullmatch(about):
                about, default = unset[1], default or unset[2]
            if parameter.metavar == "NAME" and choices:
                about += f" One of {', '.join(choices)}."
            if get_origin(kind) is list and label.startswith("-"):
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
            of an argument, `FILE`. Validated settings without a row have an option of their name. Those of printing
            come last.
        settings: class of the settings that rows set, if `run` does not name it.
        name: name instead of that of `run`.
        on_ranks: whether torchrun or Slurm may start the command as one job, of which only the first rank reports.
        about: help text instead of the docstring.
        defaults: returns defaults for the help text by option; called for help alone.
    """
    taken = next(iter(inspect.signature(run).parameters.values())).annotation
    validated = taken if isinstance(taken, type) and issubclass(taken, Section) else None
    named = {row.key.partition(".")[0] for row in rows.values()}
    own = {option_of(field): Option(field) for field in getattr(validated, "model_fields", ()) if field not in named}
    more = {_ALL: Option(kind=bool, help="Show all options.", is_common=True)}
    rows = {**rows, **own, **_PRINTED, **(more if any(row.is_common for row in rows.values()) else {})}
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
    return f"{label.lstrip('-').replace('-', '_').lower()}_"


def _parameter(label: str, row: Option, field: Any) -> inspect.Parameter:
    kind, choices, metavar = _value(row, field)
    extra: dict[str, Any] = {"metavar": row.metavar or metavar}
    if choices:
        extra["autocompletion"] = lambda incomplete: [each for each in choices if each.startswith(incomplete)]
    if row.panel:
        extra["rich_help_panel"] = row.panel
    if not label.startswith("-"):
        info: Any = typer.Argument(**{**extra, "metavar": label}, show_default=False)
    elif label == _ALL:
        info = typer.Option(label, is_eager=True, callback=_show_all, metavar="")
    else:
        info = typer.Option(label, *row.short.split(), show_default=False, **extra)
    default: Any = False if kind is bool else None
    if is_required := field is not None and field.is_required():
        default = inspect.Parameter.empty
    annotation: Any = kind if is_required or kind is bool else kind | None
    return inspect.Parameter(
        _name(label), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


def _field(row: Option, schema: Any) -> Any:
    if not row.key or schema is None:
        return None
    *sections, name = row.key.split(".")
    for section in sections:
        schema = schema.model_fields[section].annotation
    return schema.model_fields[name]


def _value(row: Option, field: Any) -> tuple[Any, list[str], str | None]:
    """Return the type of a value on the command line, its choices and its metavar.

    Numbers and choices of settings are text, which pydantic reads.
    """
    kind = row.kind or str
    if row.kind is None and field is not None:
        kinds = [each for each in alternatives(field.annotation) if each is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else str
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    choices = [str(each.value) for each in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
    named = "|".join(choices) if len("|".join(choices)) <= _WIDEST_CHOICES else "NAME"
    metavar = named or {bool: "", int: "N", float: "X"}.get(kind)
    if field is not None and kind is not bool:
        kind = list[str] if get_origin(kind) is tuple else str
    return kind, choices, metavar


def shown_default(value: object) -> str:
    """Return a value as it can be typed; empty if a help text does not show it."""
    return "" if value is None or isinstance(value, bool | tuple) else shown(value)
