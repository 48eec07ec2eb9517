"""Micro-batches for ranks, read ahead by workers: in exact order, and resumable anywhere."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from opensora_cli.core.exceptions import HardwareError, MediaError
from opensora_cli.core.signals import END_REQUESTS
from opensora_cli.data import loading
from opensora_cli.data.batches import EpochPlan, MicroBatch
from opensora_cli.data.loading import BatchStream

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def whole(asked: MicroBatch) -> MicroBatch:
    return asked


@dataclass(frozen=True)
class Failing:
    """Fails for one sample, in the way asked for."""

    sample: int
    how: str

    def __call__(self, asked: MicroBatch) -> MicroBatch:
        if self.sample in asked.samples:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MediaError("clip.mp4 is broken", hint="fix it")
        return asked


def stream(
    *,
    micro_batches: int = 2,
    rank: int = 0,
    ranks: int = 1,
    workers: int = 0,
    count: int = 21,
    load: Any = whole,
    **changes: Any,
) -> BatchStream[MicroBatch]:
    def plan_epoch(epoch: int) -> EpochPlan:
        rng = np.random.default_rng((changes.get("seed", 0), epoch))
        return EpochPlan(np.zeros(count, dtype=np.int32), np.array([3]), rng=rng)

    return BatchStream(
        plan_epoch,
        load,
        fingerprint=changes.get("fingerprint", "same"),
        micro_batches=micro_batches,
        rank=rank,
        ranks=ranks,
        workers=workers,
        prefetch=3,
        warn=changes.get("warn", pytest.fail),
    )


def take(source: Any, count: int) -> list[MicroBatch]:
    batches = [source.next() for _ in range(count)]
    source.close()
    return batches


@WORKERS
def test_epochs_follow_each_other_and_numbers_count_on(workers: int) -> None:
    batches = take(stream(workers=workers), 14)  # 7 micro-batches an epoch, of which updates of 2 take 6
    assert [batch.number for batch in batches] == [*range(14)]
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6 + [2] * 2
    assert [batch.position for batch in batches] == [0, 1, 2, 3, 4, 5] * 2 + [0, 1]
    assert len({sample for batch in batches[:6] for sample in batch.samples}) == 18


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_what_one_process_has(ranks: int) -> None:
    alone = take(stream(micro_batches=4, count=60), 20)
    shared = [take(stream(micro_batches=4, count=60, rank=rank, ranks=ranks), 20 // ranks) for rank in range(ranks)]
    assert [batch for batches in zip(*shared, strict=True) for batch in batches] == alone


@pytest.mark.parametrize(("workers", "updates"), [(0, 1), (0, 3), (2, 5)])
def test_a_resumed_stream_goes_on_exactly(workers: int, updates: int) -> None:
    straight = take(stream(workers=workers), 16)
    first = stream(workers=workers)
    for _ in range(2 * updates):
        first.next()
    state = first.state_dict()
    first.close()
    second = stream(workers=workers)
    second.load_state_dict(state)
    assert take(second, 16 - 2 * updates) == straight[2 * updates :]
    assert second.epoch == straight[-1].epoch


@pytest.mark.parametrize("updates", [3, 4])
def test_the_state_does_not_depend_on_the_number_of_ranks(updates: int) -> None:
    states = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2), (3, 4)):
        source = stream(micro_batches=4, count=60, rank=rank, ranks=ranks)
        take(source, updates * 4 // ranks)
        states.append(source.state_dict())
    assert states == [states[0]] * 4
    assert states[0]["number"] == 4 * updates


def test_the_state_of_one_is_resumed_by_several_with_other_updates() -> None:
    alone = stream(micro_batches=2, count=60)
    take(alone, 6)
    shared = []
    for rank in range(3):
        source = stream(micro_batches=3, count=60, rank=rank, ranks=3)
        source.load_state_dict(alone.state_dict())
        shared.append(take(source, 4))
    merged = [batch for batches in zip(*shared, strict=True) for batch in batches]
    assert [batch.number for batch in merged] == [*range(6, 18)]
    assert [(batch.epoch, batch.position) for batch in merged] == [(0, p) for p in range(6, 18)]


@WORKERS
def test_the_state_is_that_after_the_last_whole_update_whatever_was_read(workers: int) -> None:
    source = stream(workers=workers)
    numbers = []
    for _ in range(5):
        numbers.append(source.state_dict()["number"])
        source.next()
    assert numbers == [0, 0, 2, 2, 4]
    source.close()
    assert take(source, 2) == take(stream(), 6)[4:]


def test_other_data_begin_with_the_next_epoch_and_a_warning() -> None:
    source = stream()
    take(source, 8)
    warnings: list[str] = []
    other = stream(fingerprint="other", warn=warnings.append, seed=7)
    other.load_state_dict(source.state_dict())
    batches = take(other, 2)
    assert [(batch.epoch, batch.position, batch.number) for batch in batches] == [(2, 0, 8), (2, 1, 9)]
    assert len(warnings) == 1
    assert "epoch 2" in warnings[0]


@WORKERS
def test_errors_of_ours_arrive_as_they_were(workers: int) -> None:
    source = stream(workers=workers, load=Failing(sample=5, how="broken"))
    with pytest.raises(MediaError, match=r"clip\.mp4 is broken") as caught:
        take(source, 7)
    source.close()
    assert caught.value.hint == "fix it"


def test_a_worker_that_is_killed_is_reported() -> None:
    source = stream(workers=1, load=Failing(sample=5, how="killed"))
    with pytest.raises(HardwareError, match="ended from outside"):
        take(source, 7)
    source.close()


def test_workers_end_with_the_stream_even_while_an_error_is_handled() -> None:
    before = psutil.Process().children()
    source = stream(workers=2)
    source.next()
    children = [child for child in psutil.Process().children() if child not in before]
    assert len(children) >= 2
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        source.close()
    assert have_ended(children)


def workers_of(process: int, *, before: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    return [child for child in psutil.Process(process).children() if child not in before]


def have_ended(processes: Sequence[psutil.Process]) -> bool:
    """Whether they end within 30 s; whether somebody asks for their exit codes does not matter."""
    deadline = time.monotonic() + 30
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_workers_leave_signals_to_the_process_that_trains() -> None:
    before = psutil.Process().children()
    source = stream(workers=2)
    first = source.next()
    for child in workers_of(os.getpid(), before=before):
        for number in (signal.SIGINT, *END_REQUESTS, signal.SIGTERM):
            child.send_signal(number)
    assert [first, *take(source, 5)] == take(stream(), 6)


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    before = psutil.Process().children()
    source = stream(workers=1)
    source.next()
    children = workers_of(os.getpid(), before=before)
    for child in children:
        child.suspend()
    source.close()
    assert have_ended(children)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers look for their parent every 5 s")
def test_workers_end_with_a_process_that_is_killed() -> None:
    def train() -> None:
        source = stream(workers=2, count=3000)
        source.next()
        time.sleep(600)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while len(children := workers_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(children) == 2
    process.kill()
    process.join()
    assert have_ended(children)


class Guarded:
    """Must not be destroyed in another process than its own, as what owns threads must not."""

    def __init__(self, note: Path) -> None:
        self.itself = self
        self.note = note
        self.process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            self.note.write_text("destroyed in a worker")


def collecting(asked: MicroBatch) -> MicroBatch:
    gc.collect()
    return asked


def test_workers_never_collect_what_the_process_had_before(tmp_path: Path) -> None:
    note = tmp_path / "note"
    gc.disable()
    try:
        Guarded(note)  # garbage from the start, which only a collection finds
        take(stream(workers=2, load=collecting), 4)
    finally:
        gc.enable()
    assert not note.exists()


class _Big:
    def __call__(self, asked: MicroBatch) -> dict[str, object]:
        return {"pixels": [torch.zeros(8)], "number": asked.number}


def test_a_batch_that_does_not_fit_into_shared_memory_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    asked = MicroBatch(number=0, epoch=0, position=0, bucket=0, samples=(0,), substitutes=())
    reading = loading._Loading(_Big())
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    assert isinstance(reading[asked][1], dict)  # this process hands nothing over
    monkeypatch.setattr(loading, "get_worker_info", object)
    error = reading[asked][1]
    assert isinstance(error, HardwareError)
    assert error.message.startswith("/dev/shm has no room for what the processes that read clips hand over: unable to")
    assert "--set data.workers=0" in str(error.hint)


def test_workers_share_every_tensor_of_a_batch() -> None:
    tensors = [torch.zeros(8), torch.ones(3), torch.arange(4)]
    loading._share_tensors({"pixels": tensors[:2], "nested": (tensors[2], "text")})
    assert all(tensor.is_shared() for tensor in tensors)
