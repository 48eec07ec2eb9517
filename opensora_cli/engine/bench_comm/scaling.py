"""How a step of real work grows faster with the ranks, and what the latency-bandwidth model predicts for more ranks."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from opensora_cli.core.documents import Document
from opensora_cli.engine.bench_comm.counting import Traffic, counted_bytes
from opensora_cli.engine.bench_comm.timing import LatencyBandwidth, meet
from opensora_cli.engine.components.hardware import timed
from opensora_cli.parallel.mesh import new_group
from opensora_cli.settings.enums import Collective, Scaling

_PREDICTED_DOUBLINGS = 3


class Workload(Protocol):
    """A step of real work that some ranks share."""

    name: str
    """For people: `denoising step`."""
    sends: Collective
    """What it sends most, whose fit is taken for all of it."""

    def prepare(self, group: dist.ProcessGroup, scaling: Scaling) -> Callable[[], object]:
        """Return the step for the ranks of a group, from one on, of which each calls it once for every step.

        `scaling` is whether the work as a whole, or that of each rank, is the same for any number of them.
        """

    def traffic(self, ranks: int, scaling: Scaling) -> Traffic:
        """Return what a step of so many ranks sends, by formula."""


class ScalingRow(Document):
    """A step at one number of ranks."""

    ranks: int
    step_s: float
    """The median of a few steps on the slowest rank; of more ranks than there are, as the model predicts."""
    is_predicted: bool
    sent_bytes: int
    """By all ranks, counted; predicted: by formula."""
    communication_share: float
    """The model's time for what is sent, over that of the step; at most 1."""
    efficiency: float | None
    """Of one rank's throughput, per rank; None where it would mean nothing, on gloo."""


class ScalingTable(Document):
    """A workload at 1, 2, 4 .. ranks, and predicted beyond."""

    workload: str
    scaling: Scaling
    rows: tuple[ScalingRow, ...]
    is_gloo: bool
    shows: str
    """`speed`, or on gloo `function`."""

    def lines(self) -> list[str]:
        found = [
            f"{self.scaling} scaling of a {self.workload}",
            f"{'ranks':>8}{'step (ms)':>14}{'sent (MiB)':>14}{'communication':>16}{'efficiency':>14}",
        ]
        for row in self.rows:
            efficiency = "-" if row.efficiency is None else f"{row.efficiency:.1%}"
            cells = f"{row.step_s * 1e3:>14.2f}{row.sent_bytes / 2**20:>14.3f}{row.communication_share:>16.1%}"
            found.append(f"{row.ranks:>8}{cells}{efficiency:>14}{'  predicted' if row.is_predicted else ''}")
        if self.is_gloo:
            found.append("on gloo this shows function, never efficiency: ranks share one machine's cores")
        return found


def ranks_to_time(ranks: int) -> list[int]:
    """Return 1, 2, 4 .. below `ranks`, and `ranks` itself."""
    doubling = [2**power for power in range(ranks.bit_length()) if 2**power < ranks]
    return [*doubling, ranks]


def measure_scaling(
    workload: Workload,
    scaling: Scaling,
    *,
    fit: LatencyBandwidth,
    group: dist.ProcessGroup,
    device: torch.device,
    steps: int,
    is_gloo: bool,
) -> ScalingTable:
    """Time a workload at 1, 2, 4 .. ranks of a group, which all call this: 1 or more `steps` after one to warm up."""
    measured: dict[int, tuple[float, Traffic]] = {}
    for ranks in ranks_to_time(group.size()):
        members = [dist.get_global_rank(group, rank) for rank in range(ranks)]
        part = new_group(members)
        seconds, own = 0.0, Traffic()
        if dist.get_rank(group) < ranks:
            seconds, own = _time_steps(workload.prepare(part, scaling), part, device, steps)
        # The others wait here, and do not disturb.
        slowest = _reduced(seconds, dist.ReduceOp.MAX, group, device)
        sent = int(_reduced(own.num_bytes, dist.ReduceOp.SUM, group, device))
        measured[ranks] = slowest, Traffic(sent, int(_reduced(own.collectives, dist.ReduceOp.MAX, group, device)))
        if dist.get_rank(group) < ranks:
            dist.destroy_process_group(part)
    return scaling_table(workload, scaling, measured, fit=fit, is_gloo=is_gloo)


def scaling_table(
    workload: Workload,
    scaling: Scaling,
    measured: Mapping[int, tuple[float, Traffic]],
    *,
    fit: LatencyBandwidth,
    is_gloo: bool,
) -> ScalingTable:
    """Return the table of what was measured, and of what is predicted for three more doublings. Pure.

    The model of a step: the time of one rank, divided by the ranks if the work is, plus latency and bytes of what is
    sent. It takes computation to be divided evenly, and nothing to overlap. `measured` maps ranks, 1 among them, to
    the seconds of a step, and what it sent.
    """
    alone_s = measured[1][0]
    steps = {ranks: (seconds, sent, False) for ranks, (seconds, sent) in measured.items()}
    for doubling in range(1, _PREDICTED_DOUBLINGS + 1):
        ranks = max(measured) * 2**doubling
        sent = workload.traffic(ranks, scaling)
        steps[ranks] = _communication_s(fit, sent, ranks) + _ideal_s(alone_s, ranks, scaling), sent, True
    rows = tuple(
        ScalingRow(
            ranks=ranks,
            step_s=seconds,
            is_predicted=is_predicted,
            sent_bytes=sent.num_bytes,
            communication_share=min(_communication_s(fit, sent, ranks) / seconds, 1.0),
            efficiency=None if is_gloo else _ideal_s(alone_s, ranks, scaling) / seconds,
        )
        for ranks, (seconds, sent, is_predicted) in steps.items()
    )
    shows = "function" if is_gloo else "speed"
    return ScalingTable(workload=workload.name, scaling=scaling, rows=rows, is_gloo=is_gloo, shows=shows)


def _ideal_s(alone_s: float, ranks: int, scaling: Scaling) -> float:
    return alone_s / ranks if scaling is Scaling.STRONG else alone_s


def _communication_s(fit: LatencyBandwidth, sent: Traffic, ranks: int) -> float:
    return fit.seconds(sent.num_bytes / ranks, collectives=sent.collectives)


def _time_steps(
    step: Callable[[], object], group: dist.ProcessGroup, device: torch.device, steps: int
) -> tuple[float, Traffic]:
    """Return the median seconds of a step, and what this rank sends in one."""
    with counted_bytes() as sent:
        step()
    seconds: list[float] = []
    for _ in range(steps):
        meet(device, group)
        seconds.append(timed(step, device))
    return sorted(seconds)[len(seconds) // 2], sent


def _reduced(value: float, operation: Any, group: dist.ProcessGroup, device: torch.device) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total, operation, group=group)
    return float(total)
