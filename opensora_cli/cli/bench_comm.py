"""`osora bench-comm`: whether the links between devices are good."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from opensora_cli.cli import errors, options, output
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.settings.enums import BenchDevice, Collective, Scaling

if TYPE_CHECKING:
    from opensora_cli.settings.tools import BenchCommSettings

_SIZES = "Sizes and repeats"

Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="N",
        help="GPUs of this machine, or with --device cpu processes. Default: all GPUs, or 2.",
        rich_help_panel=options.MACHINES,
    ),
]
Device = Annotated[
    BenchDevice | None,
    typer.Option("--device", help="auto is cuda where there are GPUs.", rich_help_panel=options.MACHINES),
]
Collectives = Annotated[
    list[Collective] | None,
    typer.Option(
        "--collective", metavar="NAME", help=f"Measure this one: {', '.join(Collective)}. Repeatable. Default: all."
    ),
]
MinBytes = Annotated[
    str | None,
    typer.Option("--min-bytes", metavar="SIZE", help="Smallest size. Default: 8.", rich_help_panel=_SIZES),
]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        help="Largest size, as in 64MiB. Default: 1GiB on GPUs, 4MiB on CPUs.",
        rich_help_panel=_SIZES,
    ),
]
Iters = Annotated[
    int | None, typer.Option("--iters", metavar="N", help="Repeats of each size. Default: 20.", rich_help_panel=_SIZES)
]
Warmup = Annotated[
    int | None, typer.Option("--warmup", metavar="N", help="Repeats before. Default: 5.", rich_help_panel=_SIZES)
]
ScalingOption = Annotated[
    Scaling | None,
    typer.Option("--scaling", help="Time steps of sampling and training at 1, 2, 4 .. ranks, too."),
]
Csv = Annotated[bool, typer.Option("--csv", help="Print the table as CSV to stdout.", rich_help_panel="Output")]
Plot = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE", help="Write a chart: .png, .svg or .pdf.", rich_help_panel="Output"),
]


def bench_comm(
    gpus: Gpus = None,
    device: Device = None,
    devices: options.Devices = None,
    collective: Collectives = None,
    min_bytes: MinBytes = None,
    max_bytes: MaxBytes = None,
    iters: Iters = None,
    warmup: Warmup = None,
    scaling: ScalingOption = None,
    plot: Plot = None,
    overwrite: options.Overwrite = False,
    csv: Csv = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure how fast devices communicate, and whether their links give what they should.

    Exits with 4 if a single element arrives wrong. On CPUs it shows that collectives work, not how fast.

    Examples:

      osora bench-comm --gpus 8

      osora bench-comm --gpus 2 --device cpu --max-bytes 64KiB

      osora bench-comm --gpus 4 --scaling strong --plot links.png
    """
    with errors.interruptible():
        if csv and json_:
            raise RequestError("--csv and --json both print to stdout", hint="drop one of them")
        from opensora_cli.core.ranks import find_context
        from opensora_cli.settings.explain import Given
        from opensora_cli.settings.layers import validate
        from opensora_cli.settings.tools import BenchCommSettings

        given = {
            "parallel.gpus": Given(gpus, "--gpus"),
            "parallel.devices": Given(devices, "--devices"),
            "device": Given(device, "--device"),
            "collectives": Given(tuple(collective or ()) or None, "--collective"),
            "min_bytes": Given(min_bytes, "--min-bytes"),
            "max_bytes": Given(max_bytes, "--max-bytes"),
            "iters": Given(iters, "--iters"),
            "warmup": Given(warmup, "--warmup"),
            "scaling": Given(scaling, "--scaling"),
            "plot": Given(plot, "--plot"),
            "overwrite": Given(overwrite, "--overwrite"),
        }
        settings = validate(BenchCommSettings, {key: at for key, at in given.items() if at.value is not None})
        context = find_context(os.environ)
        with errors.uninterrupted():
            from opensora_cli.engine.bench_comm.run import measure_as_rank, start_ranks

        if context is None:
            start_ranks(settings, rank_arguments(settings, csv=csv, as_json=json_, quiet=quiet))
            return
        prints_table = context.is_main and not csv and not json_
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
    """Return the command line of a rank, with all that its launcher knows of what is measured.

    How many ranks there are, and where, is in the environment.
    """
    valued = {
        "--device": settings.device,
        "--min-bytes": settings.min_bytes,
        "--max-bytes": settings.max_bytes,
        "--iters": settings.iters,
        "--warmup": settings.warmup,
        "--scaling": settings.scaling,
        "--plot": settings.plot,
    }
    switched = {"--overwrite": settings.overwrite, "--csv": csv, "--json": as_json, "--quiet": quiet}
    return [
        "bench-comm",
        *(f"{flag}={value}" for flag, value in valued.items() if value is not None),
        *(f"--collective={collective}" for collective in settings.collectives),
        *(flag for flag, is_on in switched.items() if is_on),
    ]


def _note(reporter: Reporter, lines: Sequence[str]) -> None:
    for line in lines:
        reporter.note(line)


def _reporter(*, is_main: bool, prints_table: bool, quiet: bool) -> Reporter:
    # Where the table itself grows on the terminal, a bar below it would only be in its way.
    grows = prints_table and sys.stdout is not None and sys.stdout.isatty()
    return SilentReporter() if grows or not is_main else output.make_reporter(quiet=quiet)
