"""Report of `osora bench-comm`: a document, lines and a chart."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.bench_comm.links import Verdict
from opensora_cli.engine.bench_comm.scaling import ScalingTable
from opensora_cli.engine.bench_comm.topology import Header
from opensora_cli.media.plots import new_figure, write_figure
from opensora_cli.settings.tools import Collective

TABLE_HEAD = (
    f"{'collective':<16}{'size (B)':>11}{'dtype':>9}{'avg (us)':>10}{'p99 (us)':>10}"
    f"{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
)
"""Bandwidths in GB/s, as nccl-tests print them. JSON also has the least and the median time."""


class Row(Document):
    """Times and rates of one collective at one size."""

    collective: Collective
    size_bytes: int
    dtype: str
    repeats: int
    min_s: float
    avg_s: float
    p50_s: float
    p99_s: float
    algorithm_bandwidth_gb_per_s: float
    """Size divided by the mean time."""
    bus_bandwidth_gb_per_s: float
    """Rate on the slowest link, comparable between numbers of ranks (nccl-tests, doc/PERFORMANCE.md)."""
    wrong: int
    """Wrong elements of all ranks."""
    wire_bytes: float = Field(serialization_alias="sent_bytes_per_rank")
    """Bytes that one rank sends, counted: the mean over ranks."""

    def line(self) -> str:
        cells = "".join(f"{seconds * 1e6:>10.1f}" for seconds in (self.avg_s, self.p99_s))
        rates = f"{self.algorithm_bandwidth_gb_per_s:>8.2f}{self.bus_bandwidth_gb_per_s:>8.2f}"
        return f"{self.collective:<16}{self.size_bytes:>11}{self.dtype:>9}{cells}{rates}{self.wrong:>7}"


class BenchReport(Document):
    """Report of a benchmark, in the schema `osora.bench-comm/3`."""

    SCHEMA: ClassVar[str | None] = "osora.bench-comm/3"

    header: Header
    shows: str
    """`speed`, or `function` on gloo."""
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    scaling: tuple[ScalingTable, ...] = ()
    wrong: int
    """Wrong elements in all rows."""
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = {}
    """Written files by kind."""

    def raise_for_problems(self) -> None:
        """Raise HardwareError if any element was wrong."""
        if self.wrong:
            names = ", ".join(dict.fromkeys(row.collective.value for row in self.rows if row.wrong))
            raise HardwareError(
                f"{self.wrong} element{'s' if self.wrong > 1 else ''} arrived wrong in {names}",
                hint="trust no result over these links: try NCCL_P2P_DISABLE=1, then have the hardware checked",
            )

    def lines(self) -> list[str]:
        return [*self.header.lines(), "", TABLE_HEAD, *(row.line() for row in self.rows), *self.closing_lines()]

    def closing_lines(self) -> list[str]:
        """Return the lines below the table."""
        found = ["", *(f"verdict     {verdict.line()}" for verdict in self.verdicts)]
        for table in self.scaling:
            found += ["", *table.lines()]
        found += [f"note        {note}" for note in self.notes]
        return [*found, *(f"wrote       {path}" for path in self.files.values())]

    def write_plot(self, path: str, *, replace: bool) -> None:
        """Write a chart of bus bandwidth over size, with a dashed line at the best rate of the links.
        Raises OutputError if it cannot be written, or exists and must not be replaced.
        """
        figure = new_figure()
        axes = figure.subplots()
        for collective in dict.fromkeys(row.collective for row in self.rows):
            points = [
                (row.size_bytes, row.bus_bandwidth_gb_per_s)
                for row in self.rows
                if row.collective is collective and row.bus_bandwidth_gb_per_s > 0
            ]
            axes.plot(*zip(*points, strict=True), marker=".", label=collective.value)
        expected = max((verdict.expected_gb_per_s or 0.0 for verdict in self.verdicts), default=0.0)
        if expected:
            axes.axhline(expected, linestyle="--", color="gray", label=f"expected {expected:.0f} GB/s")
        shown = "function, not speed" if self.header.is_gloo else f"{self.header.ranks} ranks"
        axes.set_title(f"Bus bandwidth over size, {self.header.backend}: {shown}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel("bus bandwidth (GB/s)")
        axes.grid(visible=True, alpha=0.3)
        figure.legend(loc="outside right upper")
        write_figure(figure, path, replace=replace)
