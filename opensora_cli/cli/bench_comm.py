"""`osora bench-comm`: whether the links between devices are good."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from opensora_cli.cli import errors, options, output
from opensora_cli.cli.command import Command
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.settings.enums import Collective
from opensora_cli.settings.flags import MACHINE, OUTPUT, Option, option_of

if TYPE_CHECKING:
    from opensora_cli.settings.tools import BenchCommSettings

_SIZES = "Sizes and repeats"


def bench_comm(settings: "BenchCommSettings", *, csv: bool, json: bool, quiet: bool) -> None:
    """Measure how fast devices communicate, and compare their links with the expected rates.

    Exits with 4 if a single element arrives wrong. On CPUs it shows that collectives work, not how fast.

    Examples:

      osora bench-comm --gpus 8

      osora bench-comm --gpus 2 --device cpu --max-bytes 64KiB

      osora bench-comm --gpus 4 --scaling strong --plot links.png
    """
    if csv and json:
        raise RequestError("--csv and --json both print to stdout", hint="drop one of them")
    from opensora_cli.core.ranks import find_context

    context = find_context(os.environ)
    with errors.uninterrupted():
        from opensora_cli.engine.bench_comm.run import measure_as_rank, start_ranks

    if context is None:
        start_ranks(settings, rank_arguments(settings, csv=csv, as_json=json, quiet=quiet))
        return
    prints_table = context.is_main and not csv and not json
    reporter = _reporter(is_main=context.is_main, prints_table=prints_table, quiet=quiet)
    report = measure_as_rank(
        settings,
        context,
        environment=os.environ,
        reporter=reporter,
        show=output.print_lines if prints_table else partial(_note, reporter),
    )
    if context.is_main:
        if prints_table:
            output.print_lines(report.closing_lines())
        elif csv:
            output.print_lines(report.csv_lines())
        else:
            output.print_json(report.to_json())
    report.require_right()


def rank_arguments(settings: "BenchCommSettings", *, csv: bool, as_json: bool, quiet: bool) -> list[str]:
    """Return the command line of a rank; the number of ranks and their devices are in the environment."""
    names = ("device", "min_bytes", "max_bytes", "iters", "warmup", "scaling", "plot")
    values = {option_of(name): getattr(settings, name) for name in names}
    listed = {"--collective": settings.collectives, "--overwrite": settings.overwrite}
    printed = {"--csv": csv, "--json": as_json, "--quiet": quiet}
    return ["bench-comm", *options.rank_words({**values, **listed, **printed})]


def _note(reporter: Reporter, lines: Sequence[str]) -> None:
    for line in lines:
        reporter.note(line)


def _reporter(*, is_main: bool, prints_table: bool, quiet: bool) -> Reporter:
    # A bar would disturb a table that grows on the terminal.
    grows = prints_table and sys.stdout is not None and sys.stdout.isatty()
    return SilentReporter() if grows or not is_main else output.make_reporter(quiet=quiet)


_ROWS = {
    "--collective": Option(
        "collectives",
        help=f"Collective to measure: {', '.join(Collective)}. Repeatable.",
        metavar="NAME",
        default="all",
    ),
    "--scaling": Option("scaling", help="Also time steps of sampling and training at 1, 2, 4 .. ranks."),
    "--gpus": Option(
        "parallel.gpus", MACHINE, "GPUs of this machine, or with --device cpu processes.", default="all GPUs, or 2"
    ),
    "--devices": options.RANKS["--devices"],
    "--device": Option("device", MACHINE, "auto is cuda if there are GPUs."),
    "--min-bytes": Option("min_bytes", _SIZES, "Smallest size.", "SIZE"),
    "--max-bytes": Option(
        "max_bytes", _SIZES, "Largest size, as in 64MiB.", "SIZE", default="1GiB on GPUs, 4MiB on CPUs"
    ),
    "--iters": Option("iters", _SIZES),
    "--warmup": Option("warmup", _SIZES),
    "--plot": Option("plot", OUTPUT, "Write a chart: .png, .svg or .pdf.", "FILE"),
    "--overwrite": Option("overwrite", OUTPUT),
    "--csv": Option(panel=OUTPUT, help="Print the table as CSV to stdout.", kind=bool),
    **options.PRINTED,
}
COMMAND = Command("bench-comm", bench_comm, _ROWS, settings="tools:BenchCommSettings")
