"""A rank meets the others by a store, and reports stages and steps as signs of its progress."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import BYTES, SilentReporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.engine.launch import rank as rank_module
from opensora_cli.engine.launch.rank import WatchedReporter


@pytest.fixture
def beats(monkeypatch):
    sent = []
    monkeypatch.setattr(rank_module, "beat", lambda stage, step_s=None: sent.append((stage, step_s)))
    return sent


def test_a_step_may_take_as_long_as_the_longest_before_it(beats):
    times = iter([0.0, 5.0, 6.0, 14.0, 15.0])
    reporter = WatchedReporter(SilentReporter(), clock=lambda: next(times))
    with reporter.stage("denoise", total=4) as progress:
        for _ in range(4):
            progress.advance()
    assert beats == [
        ("denoise", None),
        ("denoise", 5.0),
        ("denoise", 5.0),
        ("denoise", 8.0),
        ("denoise", None),
        ("denoise", None),
    ]


def test_reading_has_no_limit(beats):
    with WatchedReporter(SilentReporter()).stage("load", total=10, unit=BYTES) as progress:
        progress.advance(5)
    assert beats == [("load", None), ("load", None)]


class Clock:
    """Time that passes only in pauses, at some moments of which other ranks come to a store."""

    def __init__(self, store, comes_at_s):
        self.now_s = 0.0
        self._store = store
        self._comes_at_s = comes_at_s

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for rank, at_s in self._comes_at_s.items():
            if self.now_s >= at_s:
                self._store.set(f"here/{rank}", "")


def waited(monkeypatch, *, rank=0, world_size=4, comes_at_s, timeout_s=600.0):
    told, store = [], dist.HashStore()
    monkeypatch.setattr(rank_module, "print", lambda line, **_: told.append(line), raising=False)
    monkeypatch.setattr(rank_module, "time", Clock(store, comes_at_s))
    notices = rank_module._Wait(f"rank {rank} of {world_size}", timeout_s)
    try:
        rank_module._wait_for_all(store, rank, world_size, notices)
    except HardwareError as error:
        told.append(error)
    return told, store


def test_who_is_missing_is_named_after_ten_seconds_and_again_at_intervals(monkeypatch):
    told, _ = waited(monkeypatch, comes_at_s={1: 0, 3: 15, 2: 45})
    assert told == [
        "rank 0 of 4: waiting for ranks 2, 3, here are 2 (10 s of 600 s)",
        "rank 0 of 4: waiting for rank 2, here are 3 (20 s of 600 s)",
        "rank 0 of 4: waiting for rank 2, here are 3 (40 s of 600 s)",
    ]


def test_one_rank_speaks_for_all_who_are_here(monkeypatch):
    assert waited(monkeypatch, rank=2, comes_at_s={1: 0, 3: 0, 0: 30})[0] == []
    [first, second] = waited(monkeypatch, rank=1, comes_at_s={2: 0, 3: 0, 0: 30})[0]
    assert first == "rank 1 of 4: waiting for rank 0, here are 3 (10 s of 600 s)"
    assert second.endswith("(20 s of 600 s)")


def test_at_the_time_limit_it_ends_with_4_and_who_comes_later_waits_for_this_rank(monkeypatch):
    told, store = waited(monkeypatch, comes_at_s={1: 0}, timeout_s=30)
    assert (told[-1].message, told[-1].exit_code) == ("rank 0 of 4: ranks 2, 3 did not come within 30 s", 4)
    assert store.check(["here/1"])
    assert not store.check(["here/0"])


def test_a_store_that_does_not_answer_is_named_while_it_is_waited_for(monkeypatch, capsys):
    refused = []

    def refuse(address, *, timeout):
        refused.append(timeout)
        raise ConnectionRefusedError(111, "Connection refused")

    context = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="node0", master_port=29500)
    monkeypatch.setattr(rank_module, "time", Clock(dist.HashStore(), {}))
    monkeypatch.setattr(rank_module, "socket", SimpleNamespace(create_connection=refuse))
    with pytest.raises(HardwareError, match=r"rank 1: no answer from node0:29500 within \d+ s") as raised:
        rank_module.init_with_retry("cpu", context, timeout_s=60.0)
    assert raised.value.exit_code == 4
    line = "rank 1 of 2: waiting for an answer from node0:29500, where rank 0 or its launcher listens"
    assert [text.partition(" (")[0] for text in capsys.readouterr().err.splitlines()] == [line] * 3
    assert max(refused) == 10.0
