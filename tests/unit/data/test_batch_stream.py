"""Micro-batches for ranks, read ahead by workers: in exact order, and resumable anywhere."""

import errno
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import FileProblem, HardwareError, MediaError
from opensora_cli.core.signals import END_REQUESTS
from opensora_cli.data.batches import ClipBatch, ClipRequest, EpochPlan, MicroBatch
from opensora_cli.data.loading import BatchStream, ClipReader, share

WORKERS = pytest.mark.parametrize("workers", [0, 2])


@dataclass(frozen=True)
class Numbered:
    """`ClipSource` whose clips are named after epoch and sample, in micro-batches of three."""

    count: int = 21
    seed: int = 0
    fingerprint: str = "same"

    def plan_epoch(self, epoch: int) -> EpochPlan:
        rng = np.random.default_rng((self.seed, epoch))
        return EpochPlan(np.zeros(self.count, dtype=np.int32), np.array([3]), rng=rng)

    def request(self, sample: int, **place: int) -> ClipRequest:
        return ClipRequest(path=f"{sample}.mp4", num_frames=1, height=8, width=8)

    def read(self, request: ClipRequest) -> torch.Tensor:
        return torch.zeros(1, 8, 8, 3, dtype=torch.uint8)


def named(request: ClipRequest) -> str:
    return request.path


def stream(
    *, micro_batches: int = 2, rank: int = 0, ranks: int = 1, workers: int = 0, load: Any = named, **source: Any
) -> BatchStream:
    return BatchStream(
        Numbered(**source),
        load=load,
        micro_batches=micro_batches,
        rank=rank,
        ranks=ranks,
        workers=workers,
        prefetch=3,
        reporter=RecordingReporter(),
    )


def take(source: BatchStream, count: int) -> list[ClipBatch]:
    batches = [source.next() for _ in range(count)]
    source.close()
    return batches


@WORKERS
def test_epochs_follow_each_other_and_numbers_count_on(workers):
    batches = take(stream(workers=workers), 14)  # 7 micro-batches an epoch, of which updates of 2 take 6
    assert [batch.number for batch in batches] == [*range(14)]
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6 + [2] * 2
    assert len({path for batch in batches[:6] for path in batch.paths}) == 18


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_out_what_one_process_has(ranks):
    alone = take(stream(micro_batches=4, count=60), 20)
    shared = [take(stream(micro_batches=4, count=60, rank=rank, ranks=ranks), 20 // ranks) for rank in range(ranks)]
    assert [batch for batches in zip(*shared, strict=True) for batch in batches] == alone


@pytest.mark.parametrize(("workers", "updates"), [(0, 1), (0, 3), (2, 5)])
def test_a_resumed_stream_goes_on_exactly(workers, updates):
    straight = take(stream(workers=workers), 16)
    first, second = stream(workers=workers), stream(workers=workers)
    for _ in range(2 * updates):
        first.next()
    second.load_state_dict(first.state_dict())
    first.close()
    assert take(second, 16 - 2 * updates) == straight[2 * updates :]
    assert second.epoch == straight[-1].epoch


@pytest.mark.parametrize("updates", [3, 4])
def test_the_state_does_not_depend_on_the_number_of_ranks(updates):
    states = []
    for rank, ranks in ((0, 1), (0, 2), (1, 2), (3, 4)):
        source = stream(micro_batches=4, count=60, rank=rank, ranks=ranks)
        take(source, updates * 4 // ranks)
        states.append(source.state_dict())
    assert states == [states[0]] * 4
    assert states[0]["number"] == 4 * updates


def test_the_state_of_one_is_resumed_by_several_with_other_updates():
    alone = stream(micro_batches=2, count=60)
    first = take(alone, 6)
    shared = []
    for rank in range(3):
        source = stream(micro_batches=3, count=60, rank=rank, ranks=3)
        source.load_state_dict(alone.state_dict())
        shared.append(take(source, 4))
    merged = [batch for batches in zip(*shared, strict=True) for batch in batches]
    assert [*first, *merged] == take(stream(count=60), 18)


@WORKERS
def test_the_state_is_that_after_the_last_whole_update_whatever_was_read(workers):
    source = stream(workers=workers)
    numbers = []
    for _ in range(5):
        numbers.append(source.state_dict()["number"])
        source.next()
    assert numbers == [0, 0, 2, 2, 4]
    source.close()
    assert take(source, 2) == take(stream(), 6)[4:]


def test_other_data_begin_with_the_next_epoch_and_a_warning():
    source, other = stream(), stream(fingerprint="other", seed=7)
    take(source, 8)
    other.load_state_dict(source.state_dict())
    assert [(batch.epoch, batch.number) for batch in take(other, 2)] == [(2, 8), (2, 9)]
    (warning,) = other._reporter.warnings
    assert "epoch 2" in warning


def refusing(request: ClipRequest) -> str:
    raise MediaError(f"{request.path} is broken")


def crashing(request: ClipRequest) -> str:
    if request.path == "5.mp4":
        os.kill(os.getpid(), signal.SIGSEGV)
    return request.path


def failing(request: ClipRequest) -> str:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("load", "kind", "said"),
    [(refusing, FileProblem, "3 others of its bucket cannot be read"), (failing, ZeroDivisionError, "while reading")],
)
@WORKERS
def test_an_error_names_the_file(workers, load, kind, said):
    source = stream(workers=workers, load=load)
    with pytest.raises(kind) as caught:
        source.next()
    source.close()
    text = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert ".mp4" in text
    assert said in text


def test_a_crashed_worker_names_its_file():
    source = stream(workers=1, load=crashing)
    with pytest.raises(HardwareError, match=r"ended from outside.*5\.mp4") as caught:
        take(source, 7)
    source.close()
    assert "take it out of the table" in (caught.value.hint or "")


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


@pytest.mark.parametrize("hangs", [False, True])
def test_workers_end_with_the_stream_even_while_an_error_is_handled(monkeypatch, hangs):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    before = psutil.Process().children()
    source = stream(workers=2)
    source.next()
    children = workers_of(os.getpid(), before=before)
    assert len(children) >= 2
    for child in children if hangs else ():
        child.suspend()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        source.close()
    assert have_ended(children)


def test_workers_leave_signals_to_the_process_that_trains():
    before = psutil.Process().children()
    source = stream(workers=2)
    first = source.next()
    for child in workers_of(os.getpid(), before=before):
        for number in (signal.SIGINT, *END_REQUESTS, signal.SIGTERM):
            child.send_signal(number)
    assert [first, *take(source, 5)] == take(stream(), 6)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers look for their parent every 5 s")
def test_workers_end_with_a_process_that_is_killed():
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


def collecting(request: ClipRequest) -> str:
    gc.collect()
    return request.path


def test_workers_never_collect_what_the_process_had_before(tmp_path):
    note = tmp_path / "note"
    gc.disable()
    try:
        Guarded(note)  # garbage from the start, which only a collection finds
        take(stream(workers=2, load=collecting), 4)
    finally:
        gc.enable()
    assert not note.exists()


def test_a_batch_that_does_not_fit_into_shared_memory_is_an_error_and_no_wait(monkeypatch):
    def full(self: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    asked = MicroBatch(number=0, epoch=0, position=0, bucket=0, samples=(0,), substitutes=())
    reader = ClipReader(Numbered(), None)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    assert isinstance(reader[asked][1], ClipBatch)  # this process hands nothing over
    with pytest.raises(
        HardwareError, match="/dev/shm has no room for what the processes that read clips hand"
    ) as error:
        share(reader.read(asked))
    assert "--set data.workers=0" in str(error.value.hint)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, of its half-made iterator
def test_workers_that_were_started_before_another_failed_do_not_outlive_the_error(monkeypatch):
    # Two queues: one for results, and one for the first worker.
    queues = iter([torch.multiprocessing.Queue(), torch.multiprocessing.Queue()])

    def queue() -> Any:
        if (made := next(queues, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return made

    monkeypatch.setattr(torch.multiprocessing, "Queue", queue)
    others = {*multiprocessing.active_children()}  # such as the ranks of distributed tests
    with pytest.raises(HardwareError, match="/dev/shm has no room"):
        stream(workers=2).next()
    left = {*multiprocessing.active_children()} - others
    for worker in left:
        worker.join(10)
    assert not any(worker.is_alive() for worker in left)


def test_workers_share_every_tensor_of_a_batch():
    whole, part = torch.ones(3), torch.arange(4)
    request = Numbered().request(0)
    pixels = ClipBatch(number=0, epoch=0, requests=(request,), pixels_BTHWC=torch.zeros(8), cached=None)
    share(pixels)
    share(replace(pixels, pixels_BTHWC=None, cached=({"latents": whole, "head1": part}, "no tensor")))
    assert pixels.pixels_BTHWC is not None
    assert all(tensor.is_shared() for tensor in (pixels.pixels_BTHWC, whole, part))
