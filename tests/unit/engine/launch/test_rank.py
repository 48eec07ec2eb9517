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


def test_who_is_missing_is_named_once_and_at_the_end(monkeypatch, capsys):
    context = RankContext(rank=0, local_rank=0, world_size=4, nnodes=1, master_addr="node0", master_port=29500)
    store, now_s = dist.HashStore(), [0.0]
    store.set("here/1", "")
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda seconds: now_s.append(now_s.pop() + seconds))
    monkeypatch.setattr(rank_module, "time", clock)
    with pytest.raises(HardwareError, match=r"rank 0: ranks 2, 3 did not come in time"):
        rank_module._wait_for_all(store, context, 30.0)
    assert capsys.readouterr().err == "rank 0: waiting for ranks 2, 3\n"


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    def refuse(address, *, timeout):
        raise ConnectionRefusedError(111, "Connection refused")

    context = RankContext(rank=1, local_rank=1, world_size=2, nnodes=1, master_addr="node0", master_port=29500)
    monkeypatch.setattr(rank_module, "socket", SimpleNamespace(create_connection=refuse))
    with pytest.raises(HardwareError, match="rank 1: no answer from node0:29500, where rank 0") as raised:
        rank_module.init_with_retry("cpu", context, timeout_s=0.3)
    assert raised.value.exit_code == 4
