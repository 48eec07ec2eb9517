"""What was measured, for people and for programs."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.bench_comm.fit import LatencyBandwidth
from opensora_cli.engine.bench_comm.links import Verdict
from opensora_cli.engine.bench_comm.scaling import ScalingTable
from opensora_cli.engine.bench_comm.timing import Times
from opensora_cli.engine.bench_comm.topology import Header
from opensora_cli.settings.bench_comm import Collective

SCHEMA = "osora.bench-comm/1"

TABLE_HEAD = (
    f"{'collective':<16}{'size (B)':>12}{'dtype':>10}{'min (us)':>12}{'avg (us)':>12}{'p50 (us)':>12}{'p99 (us)':>12}"
    f"{'algbw':>10}{'busbw':>10}{'#wrong':>8}"
)
"""Bandwidths in GB/s, as nccl-tests print them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective of one size."""

    collective: Collective
    size_bytes: int
    dtype: str
    repeats: int
    times: Times
    bus_factor: float
    wrong: int
    """Elements of all ranks."""

    @property
    def algorithm_bandwidth_gb_per_s(self) -> float:
        """Size over mean time."""
        return self.size_bytes / self.times.avg_s / 1e9

    @property
    def bus_bandwidth_gb_per_s(self) -> float:
        """What the slowest link sees, whatever the number of ranks."""
        return self.algorithm_bandwidth_gb_per_s * self.bus_factor

    @property
    def wire_bytes(self) -> float:
        """What one rank puts on the wire."""
        return self.size_bytes * self.bus_factor

    def line(self) -> str:
        """Return it for people."""
        times = (self.times.min_s, self.times.avg_s, self.times.p50_s, self.times.p99_s)
        cells = "".join(f"{seconds * 1e6:>12.2f}" for seconds in times)
        rates = f"{self.algorithm_bandwidth_gb_per_s:>10.3f}{self.bus_bandwidth_gb_per_s:>10.3f}"
        return f"{self.collective:<16}{self.size_bytes:>12}{self.dtype:>10}{cells}{rates}{self.wrong:>8}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a flat JSON object."""
        return {
            "collective": self.collective.value,
            "size_bytes": self.size_bytes,
            "dtype": self.dtype,
            "repeats": self.repeats,
            **asdict(self.times),
            "algorithm_bandwidth_gb_per_s": self.algorithm_bandwidth_gb_per_s,
            "bus_bandwidth_gb_per_s": self.bus_bandwidth_gb_per_s,
            "wrong": self.wrong,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """A whole benchmark."""

    header: Header
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    fits: Mapping[Collective, LatencyBandwidth]
    """Time over the bytes that one rank sends, for each collective of several sizes."""
    scaling: tuple[ScalingTable, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """What was written: kind -> path."""

    @property
    def wrong(self) -> int:
        """Wrong elements in all rows."""
        return sum(row.wrong for row in self.rows)

    def require_right(self) -> None:
        """Raise HardwareError if any element was wrong."""
        if self.wrong:
            names = ", ".join(dict.fromkeys(row.collective.value for row in self.rows if row.wrong))
            raise HardwareError(
                f"{self.wrong} element{'s' if self.wrong > 1 else ''} arrived wrong in {names}",
                hint="trust no result over these links: try NCCL_P2P_DISABLE=1, then have the hardware checked",
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as a document of the schema `osora.bench-comm/1`."""
        return {
            "schema": SCHEMA,
            "header": self.header.to_json(),
            "shows": "function" if self.header.is_gloo else "speed",
            "rows": [row.to_json() for row in self.rows],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "fits": {collective.value: asdict(fit) for collective, fit in self.fits.items()},
            "scaling": [table.to_json() for table in self.scaling],
            "wrong": self.wrong,
            "notes": list(self.notes),
            "files": dict(self.files),
        }

    def lines(self) -> list[str]:
        """Return it for people."""
        return [*self.header.lines(), "", TABLE_HEAD, *(row.line() for row in self.rows), *self.closing_lines()]

    def closing_lines(self) -> list[str]:
        """Return what can be said only when all rows are there."""
        found = ["", *(f"verdict     {verdict.line()}" for verdict in self.verdicts)]
        found += [f"fit         {_fit_line(collective, fit)}" for collective, fit in self.fits.items()]
        for table in self.scaling:
            found += ["", *table.lines()]
        found += [f"note        {note}" for note in self.notes]
        return [*found, *(f"wrote       {path}" for path in self.files.values())]

    def csv_lines(self) -> list[str]:
        """Return the rows as CSV, with a head."""
        return csv_lines([row.to_json() for row in self.rows])


def csv_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return objects with the same keys as lines of CSV (RFC 4180)."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().splitlines()


def _fit_line(collective: Collective, fit: LatencyBandwidth) -> str:
    rate = fit.bandwidth_gb_per_s
    grows = ", whatever the size" if rate is None else f" + sent bytes / ({rate:.3f} GB/s)"
    return f"{collective:<16}t = {fit.latency_s * 1e6:.1f} us{grows}"
