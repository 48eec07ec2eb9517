"""`osora bench-comm`: rates and correctness of the links between devices."""

import sys
from collections.abc import Sequence

from opensora_cli.cli.command import DEVICES, Call, make_command
from opensora_cli.cli.output import print_lines
from opensora_cli.core.progress import SilentReporter
from opensora_cli.settings.flags import MACHINE, Option
from opensora_cli.settings.tools import BenchCommSettings, Collective

_SIZES = "Sizes and repeats"


def bench_comm(settings: BenchCommSettings, call: Call) -> None:
    """Measure how fast devices communicate, and compare their links with the expected rates.

    Exits with 4 if a single element arrives wrong. On CPUs it shows that collectives work, not how fast.

    Examples:
      osora bench-comm --gpus 8
      osora bench-comm --gpus 2 --device cpu --max-bytes 64KiB
      osora bench-comm --gpus 4 --scaling strong
    """
    context = call.context
    with call.loading():
        from opensora_cli.engine.bench_comm.run import measure_as_rank, start_ranks

    if context is None:
        start_ranks(settings, call.words)
        return
    grows = context.is_main and not call.as_json

    def note(lines: Sequence[str]) -> None:
        for line in lines:
            call.reporter.note(line)

    # A bar would disturb a table that grows on the terminal.
    is_on_terminal = grows and sys.stdout is not None and sys.stdout.isatty()
    reporter = SilentReporter() if is_on_terminal else call.reporter
    show = print_lines if grows else note
    report = measure_as_rank(settings, context, reporter=reporter, show=show)
    if grows:
        print_lines(report.closing_lines())
    else:
        call.show(report)
    report.raise_for_problems()


_ROWS = {
    "--collective": Option("collectives", "", f"One of {', '.join(Collective)}.", "NAME", default="all"),
    "--gpus": Option("parallel.gpus", MACHINE, "GPUs, or processes on a CPU.", default="all GPUs, or 2 processes"),
    "--devices": DEVICES,
    "--device": Option("device", MACHINE, "auto means GPUs if there are any.", "DEVICE"),
    "--min-bytes": Option("min_bytes", _SIZES, metavar="SIZE"),
    "--max-bytes": Option("max_bytes", _SIZES, metavar="SIZE"),
    "--iters": Option("iters", _SIZES),
    "--warmup": Option("warmup", _SIZES),
}
COMMAND = make_command(bench_comm, _ROWS, on_ranks=True)
