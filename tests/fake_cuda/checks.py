"""What must hold of the logs of all ranks; each check returns what does not, a line each."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from fake_cuda.clocks import Clock, Clocks
from fake_cuda.log import (
    MAIN,
    Allocated,
    Collective,
    Copy,
    Entry,
    Freed,
    Lent,
    Log,
    Operand,
    Operation,
    Stage,
    Synchronized,
    Unlocked,
)

_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
    *("native_layer_norm", "_fused_rms_norm", "native_group_norm"),
    *(f"{name}{direction}" for name in _ATTENTION for direction in ("", "_backward")),
)
"""Kernels that refuse operands of two floating-point types, or compute in another one than was meant."""
TOLERANCE = 0.1
"""Of the peak that was planned."""


def dtype_faults(log: Log) -> Iterator[str]:
    """Find products of tensors of two floating-point types."""
    for entry in _operations(log):
        if entry.name in _PRODUCTS:
            dtypes = {each.dtype for each in entry.reads if each.dtype.is_floating_point and each.shape}
            # The sums of attention and of norms are in fp32, whatever is summed.
            if "backward" in entry.name:
                dtypes -= {torch.float32} if len(dtypes) > 1 else set()
            if len(dtypes) > 1:
                yield f"{entry.where}: {entry.name} of {_listed(dtypes)}"


def device_faults(log: Log, device: torch.device) -> Iterator[str]:
    """Find operations on a device that is not the rank's, or between the host and the device, that are no copies."""
    for entry in _operations(log):
        devices = {each.device for each in entry.operands if each.shape or isinstance(entry, Copy)}
        if any(each.type == "cuda" and each != device for each in devices):
            yield f"{entry.where}: {entry.name} on {_listed(devices)}, and this rank has {device}"
        elif len(devices) > 1 and not isinstance(entry, Copy):
            yield f"{entry.where}: {entry.name} between {_listed(devices)}"


def copy_faults(log: Log) -> Iterator[str]:
    """Find copies that are to go along with other work, from or to memory of the host that is not pinned."""
    for entry in _operations(log):
        if isinstance(entry, Copy) and not entry.is_blocking:
            hosts = [each for each in entry.operands if each.device.type == "cpu"]
            if any(not each.is_pinned for each in hosts):
                yield f"{entry.where}: a copy that does not block, of memory that is not pinned"


def sync_faults(log: Log, *, stage: str, allowed: Container[str] = ()) -> Iterator[str]:
    """Find where the main thread waits for the device between the first and the last unit of work of a stage.

    `allowed` are the lines of the engine that may.
    """
    for entry in _between_advances(log, stage):
        if isinstance(entry, Synchronized):
            what = entry.what
        elif isinstance(entry, Copy) and entry.is_blocking:
            what = f"a blocking copy ({entry.name})"
        else:
            continue
        if entry.thread == MAIN and entry.where not in allowed:
            yield f"{entry.where}: {what} waits for the device inside the stage {stage}"


def _between_advances(log: Log, stage: str) -> list[Entry]:
    found: list[Entry] = []
    start = stop = None
    for index, entry in enumerate(log.entries):
        match entry:
            case Stage(stage=name, what="began") if name == stage:
                start = index
            case Stage(stage=name, what="advanced") if name == stage:
                stop = index
            case Stage(stage=name, what="ended") if name == stage and stop is not None:
                found += log.entries[start:stop]
                stop = None
    if not found:
        raise ValueError(f"nothing was done in a stage {stage}")
    return found


@dataclass(frozen=True, slots=True)
class _Access:
    agent: str
    tick: int
    operand: Operand
    is_write: bool
    where: str


def order_faults(log: Log) -> Iterator[str]:
    """Find memory that is written or freed while it may still be used, or read while it may still be written to.

    Of the host's memory only what is pinned is looked at: other copies of it are over when the call returns.
    """
    clocks = Clocks()
    accesses: dict[int, list[_Access]] = {}
    makers: dict[int, str] = {}
    lent: dict[int, set[str]] = {}
    for entry in log.entries:
        clocks.pass_(entry)
        match entry:
            case Allocated() if entry.queue is not None:
                makers[entry.storage] = entry.queue
            case Lent():
                lent.setdefault(entry.storage, set()).add(entry.queue)
            case Freed():
                waits_for = lent.pop(entry.storage, set())
                used = [each for each in accesses.pop(entry.storage, []) if each.agent not in waits_for]
                yield from _freed(clocks, used, entry.thread, makers.pop(entry.storage, None))
            case Unlocked():
                yield from _unlocked(clocks, accesses.get(entry.storage, []), entry)
            case Operation():
                yield from _used(entry, clocks.of(entry.queue or entry.thread), accesses)


def _used(entry: Operation, clock: Clock, accesses: dict[int, list[_Access]]) -> Iterator[str]:
    agent = entry.queue or entry.thread
    for operand, is_write in (*((each, False) for each in entry.reads), *((each, True) for each in entry.writes)):
        if operand.device.type == "cpu" and not operand.is_pinned:
            continue
        new = _Access(agent, clock[agent], operand, is_write, entry.where)
        before = accesses.setdefault(operand.storage, [])
        for old in before:
            if old.agent == agent or not (is_write or old.is_write) or not _overlap(old.operand, operand):
                continue
            if clock.get(old.agent, -1) < old.tick:
                does, done = ("writes to" if is_write else "reads"), ("written to" if old.is_write else "read")
                yield f"{entry.where}: {agent} {does} memory that {old.agent} may not have {done} yet ({old.where})"
        before[:] = [old for old in before if not _covers(new, old)]
        before.append(new)


def _freed(clocks: Clocks, accesses: list[_Access], thread: str, maker: str | None) -> Iterator[str]:
    if maker is None:  # torch frees pinned memory when the device is done with it
        return
    # What is queued next on the stream that it belongs to may get it.
    known, queued = clocks.of(thread), clocks.of(maker)
    for old in accesses:
        if old.agent != maker and max(known.get(old.agent, -1), queued.get(old.agent, -1)) < old.tick:
            yield f"{old.where}: memory is freed that {old.agent} may still use"


def _unlocked(clocks: Clocks, accesses: list[_Access], entry: Unlocked) -> Iterator[str]:
    known = clocks.of(entry.thread)
    for old in accesses:
        if known.get(old.agent, -1) < old.tick:
            yield f"{entry.where}: memory is unlocked that {old.agent} may still use ({old.where})"


def _overlap(one: Operand, other: Operand) -> bool:
    return one.start < other.stop and other.start < one.stop


def _covers(new: _Access, old: _Access) -> bool:
    """Whether who comes after the new access comes after the old one, too."""
    inside = new.operand.start <= old.operand.start and old.operand.stop <= new.operand.stop
    return inside and (new.is_write or (old.agent == new.agent and not old.is_write))


def memory_faults(log: Log, planned: Mapping[str, int]) -> Iterator[str]:
    """Find stages that need over a tenth more of the device than planned, or less by that much; `planned` in bytes."""
    for stage, peak in stage_peaks(log, planned).items():
        expected = planned[stage]
        if abs(peak - expected) > TOLERANCE * expected:
            yield f"the stage {stage} takes {peak / 2**30:.2f} GiB, and {expected / 2**30:.2f} GiB are planned"


def stage_peaks(log: Log, stages: Iterable[str]) -> dict[str, int]:
    """Return the most bytes of the device that are in use in each stage that there was."""
    wanted, running, live, peaks = set(stages), [], 0, dict[str, int]()
    for entry in log.entries:
        match entry:
            case Stage(what="began") if entry.stage in wanted:
                running.append(entry.stage)
                peaks[entry.stage] = max(live, peaks.get(entry.stage, 0))
            case Stage(what="ended") if entry.stage in wanted:
                running.remove(entry.stage)
            case Allocated() if entry.device.type == "cuda":
                live += entry.num_bytes
                for stage in running:
                    peaks[stage] = max(peaks[stage], live)
            case Freed() if entry.device.type == "cuda":
                live -= entry.num_bytes
    return peaks


def split_faults(log: Log) -> Iterator[str]:
    """Find all-to-alls whose parts do not add up to their tensors."""
    for entry in _collectives(log):
        if entry.name == "alltoall_base":
            for word, parts, operands in (("sends", entry.sent, entry.reads), ("gets", entry.received, entry.writes)):
                if sum(parts) != prod(operands[0].shape) or len(parts) != len(entry.group):
                    yield f"{entry.where}: rank {log.rank} {word} {parts} of {prod(operands[0].shape)} elements"


def collective_faults(logs: Mapping[int, Log]) -> Iterator[str]:
    """Find groups whose ranks call other collectives, in another order, or with sizes that do not fit."""
    of_groups: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    for rank, log in logs.items():
        yield from split_faults(log)
        for entry in _collectives(log):
            if entry.name not in ("send", "recv"):
                of_groups.setdefault(entry.group, {}).setdefault(rank, []).append(entry)
    for group, calls in of_groups.items():
        here = [rank for rank in group if rank in logs]
        counts = {rank: len(calls.get(rank, [])) for rank in here}
        if len(set(counts.values())) > 1:
            yield f"the ranks {_listed(group)} call {counts} collectives"
        for index, together in enumerate(zip(*(calls.get(rank, []) for rank in here), strict=False)):
            yield from (f"collective {index} of {_listed(group)}: {fault}" for fault in _unlike(here, together))
    yield from _message_faults(logs)


def _unlike(ranks: Sequence[int], together: Sequence[Collective]) -> Iterator[str]:
    first = together[0]
    where = ", ".join(dict.fromkeys(f"rank {rank} at {each.where}" for rank, each in zip(ranks, together, strict=True)))
    if len({(each.name, each.peer) for each in together}) > 1:
        names, roots = [each.name for each in together], [each.peer for each in together]
        yield f"not the same: {names} with roots {roots} ({where})"
        return
    if len({each.dtype for part in together for each in part.operands}) > 1:
        yield f"{first.name} of {_listed({each.dtype for part in together for each in part.operands})} ({where})"
    match first.name:
        case "alltoall_base":
            for sender, mine in zip(ranks, together, strict=True):
                for receiver, theirs in zip(ranks, together, strict=True):
                    goes = mine.sent[first.group.index(receiver)]
                    comes = theirs.received[first.group.index(sender)]
                    if goes != comes:
                        yield f"rank {sender} sends {goes} elements, and rank {receiver} expects {comes} ({where})"
        case "broadcast":
            sizes = {sum(each.sent or each.received) for each in together}
            if len(sizes) > 1:
                yield f"broadcast of {_listed(sizes)} elements ({where})"
        case "allgather_base":
            if any(len(each.group) * sum(each.sent) != sum(each.received) for each in together):
                yield f"all_gather of {[sum(each.sent) for each in together]} elements ({where})"
            if len({sum(each.sent) for each in together}) > 1:
                yield f"all_gather of shares that differ: {[sum(each.sent) for each in together]} ({where})"
        case _:
            if len({(each.sent, each.received) for each in together}) > 1:
                yield f"{first.name} of {[each.sent for each in together]} elements ({where})"


def _message_faults(logs: Mapping[int, Log]) -> Iterator[str]:
    """Find messages of one rank to another that are not expected there, or have another size."""
    messages: dict[tuple[tuple[int, ...], int, int], dict[str, list[Collective]]] = {}
    for rank, log in logs.items():
        for entry in _collectives(log):
            if entry.name in ("send", "recv") and entry.peer in logs:
                ways = (rank, entry.peer) if entry.name == "send" else (entry.peer, rank)
                messages.setdefault((entry.group, *ways), {"send": [], "recv": []})[entry.name].append(entry)
    for (_, source, target), entries in sorted(messages.items()):
        goes, comes = entries["send"], entries["recv"]
        if len(goes) != len(comes):
            yield f"rank {source} sends {len(goes)} messages to rank {target}, which expects {len(comes)}"
        for index, (one, other) in enumerate(zip(goes, comes, strict=False)):
            if one.sent != other.received or one.reads[0].dtype != other.writes[0].dtype:
                yield (
                    f"message {index} of rank {source} has {one.sent} of {one.reads[0].dtype}, and rank {target} "
                    f"expects {other.received} of {other.writes[0].dtype} ({one.where}, {other.where})"
                )


def faults(log: Log, device: torch.device, *, stage: str, allowed: Container[str] = ()) -> list[str]:
    """Return all that is wrong with what one rank did, but for its memory."""
    found = [
        *dtype_faults(log),
        *device_faults(log, device),
        *copy_faults(log),
        *sync_faults(log, stage=stage, allowed=allowed),
        *order_faults(log),
        *split_faults(log),
    ]
    return [f"{line} ({len(list(times))} times)" for line, times in groupby(sorted(found))]


def _operations(log: Log) -> Iterator[Operation]:
    return (entry for entry in log.entries if isinstance(entry, Operation) and not isinstance(entry, Collective))


def _collectives(log: Log) -> Iterator[Collective]:
    return (entry for entry in log.entries if isinstance(entry, Collective))


def _listed(things: Iterable[object]) -> str:
    return ", ".join(sorted(str(each).removeprefix("torch.") for each in things))
