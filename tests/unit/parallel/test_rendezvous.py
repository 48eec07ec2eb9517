"""Ranks that meet by the store: all of them come to the same end."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

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
