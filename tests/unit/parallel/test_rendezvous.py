"""Ranks that meet by the store: all of them come to the same end."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.parallel import rendezvous
from opensora_cli.parallel.rendezvous import AbsentRanks, Rendezvous


class Store:
    """A store that lets something happen after it has said that a key is not there."""

    def __init__(self, store, *, on_missing=lambda: None):
        self._store = store
        self._on_missing = on_missing

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        is_there = self._store.check(keys)
        if not is_there:
            self._on_missing()
        return is_there


def meeting(rank, store, size=2):
    return Rendezvous(SimpleNamespace(rank=lambda: rank, size=lambda: size, get_group_store=lambda: store), "test")


def exchanged(met, note, timeout_s=5.0):
    try:
        return met.exchange(note, timeout_s=timeout_s)
    except AbsentRanks as absent:
        return absent.ranks


def together(*meetings):
    found = {}
    threads = [
        threading.Thread(target=lambda rank=rank, met=met: found.update({rank: exchanged(met, f"note {rank}")}))
        for rank, met in enumerate(meetings)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(meetings))]


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
    monkeypatch.setattr(rendezvous, "time", Clock(store, comes_at_s))
    notices = rendezvous._Notices(f"rank {rank} of {world_size}", timeout_s=timeout_s, report=told.append)
    try:
        rendezvous._wait_for_all(store, rank, world_size, notices)
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


def test_ranks_that_are_in_time_are_not_spoken_of(monkeypatch):
    assert waited(monkeypatch, comes_at_s={1: 2, 2: 3, 3: 9})[0] == []


def test_one_rank_speaks_for_all_who_are_here(monkeypatch):
    assert waited(monkeypatch, rank=2, comes_at_s={1: 0, 3: 0, 0: 30})[0] == []
    [first, second] = waited(monkeypatch, rank=1, comes_at_s={2: 0, 3: 0, 0: 30})[0]
    assert first == "rank 1 of 4: waiting for rank 0, here are 3 (10 s of 600 s)"
    assert second.endswith("(20 s of 600 s)")


def test_many_that_are_missing_are_counted(monkeypatch):
    told, _ = waited(monkeypatch, world_size=64, comes_at_s={}, timeout_s=15)
    assert told[0] == "rank 0 of 64: waiting for ranks 1, 2, 3 and 60 more, here are 1 (10 s of 15 s)"


def test_at_the_time_limit_it_ends_with_4_and_who_comes_later_waits_for_this_rank(monkeypatch):
    told, store = waited(monkeypatch, comes_at_s={1: 0}, timeout_s=30)
    assert (told[-1].message, told[-1].exit_code) == ("rank 0 of 4: ranks 2, 3 did not come within 30 s", 4)
    assert store.check(["here/1"])
    assert not store.check(["here/0"])


def test_a_store_that_does_not_answer_is_named_while_it_is_waited_for(monkeypatch):
    told, refused = [], []

    def refuse(address, *, timeout):
        refused.append(timeout)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(rendezvous, "time", Clock(dist.HashStore(), {}))
    monkeypatch.setattr(rendezvous, "socket", SimpleNamespace(create_connection=refuse))
    with pytest.raises(HardwareError, match=r"rank 1: no answer from node0:29500 within \d+ s") as raised:
        rendezvous.init_with_retry(
            "cpu", host="node0", port=29500, rank=1, world_size=2, timeout_s=60.0, report=told.append
        )
    assert raised.value.exit_code == 4
    line = "rank 1 of 2: waiting for an answer from node0:29500, where rank 0 or its launcher listens"
    assert [text.partition(" (")[0] for text in told] == [line] * 3
    assert max(refused) == 10.0


def test_all_get_all_notes_and_leave_little_behind():
    store = dist.HashStore()
    meetings = [meeting(rank, store, 3) for rank in range(3)]
    assert together(*meetings) == [["note 0", "note 1", "note 2"]] * 3
    keys = store.num_keys()
    for _ in range(3):
        together(*meetings)
    assert store.num_keys() == keys


def test_who_comes_after_another_gave_up_does_not_go_on_alone():
    store = dist.HashStore()
    first, second = meeting(0, store), meeting(1, store)
    assert exchanged(first, "a", timeout_s=0.05) == [1]
    assert exchanged(second, "b") == [0]
    assert together(first, second) == [["note 0", "note 1"]] * 2


def test_who_comes_while_another_is_giving_up():
    """Both go on, or neither does."""
    store = dist.HashStore()
    late = []
    second = meeting(1, store)
    first = meeting(0, Store(store, on_missing=lambda: late.append(exchanged(second, "b"))))
    assert exchanged(first, "a", timeout_s=0.05) == ["a", "b"]
    assert late == [["a", "b"]]


def test_of_two_that_give_up_each_names_who_is_absent():
    store = dist.HashStore()
    meetings = [meeting(rank, store, 3) for rank in range(3)]
    assert exchanged(meetings[0], "a", timeout_s=0.05) == [1, 2]
    assert exchanged(meetings[1], "b", timeout_s=0.05) == [2]
    with pytest.raises(AbsentRanks, match=r"ranks \[0\] did not come"):
        meetings[2].exchange("c", timeout_s=1.0)
