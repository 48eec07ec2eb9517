"""Backends of attention timed on the shapes of a run, once: the fastest that agrees is taken, and remembered."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from opensora_cli.core.attention import AttentionBackend, PartKernel
from opensora_cli.core.attention_kinds import ATTENTION_KINDS
from opensora_cli.engine.components import attention, attention_times
from opensora_cli.engine.components.attention import AttentionUse, choose_attention, timed_attention, why_unusable
from opensora_cli.engine.components.attention_times import AttentionShape, RememberedTimes, time_attention
from opensora_cli.models.attention import attention_backend
from opensora_cli.models.attention.math import math
from opensora_cli.settings.enums import AttentionChoice

CPU = torch.device("cpu")
SHAPE = AttentionShape(heads=3, queries=200, keys=200, head_dim=16)
USE = AttentionUse(device=CPU, dtype=torch.float32, head_dim=16)


class Backends:
    """Stand-ins that agree with `math`, and a clock on which each takes as long as it is said to."""

    def __init__(self, **milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.now = 0.0
        self.calls: list[tuple[str, tuple[torch.Size, ...]]] = []
        self.computes = dict.fromkeys(milliseconds, math.attend)

    def __call__(self, name: str) -> AttentionBackend:
        if name not in self.milliseconds:
            return attention_backend(name)

        def attend(q, k, v, /):
            self.calls.append((name, (q.shape, k.shape, v.shape)))
            self.now += self.milliseconds[name] / 1e3
            return self.computes[name](q, k, v)

        def attend_part(q, k, v):
            return attend(q, k, v), torch.zeros(())

        return AttentionBackend(name, attend, part_kernel=lambda q, k, v: PartKernel(attend_part, attend_part))

    def time(self, shape=SHAPE, dtype=torch.float32):
        return time_attention(tuple(self.milliseconds), shape, device=CPU, dtype=dtype, clock=lambda: self.now)

    def decide(self, *, notes=None, use=USE, shape=SHAPE):
        """Return what `auto` comes to in a run."""
        planned = choose_attention(AttentionChoice.AUTO, use, setting="runtime.attention", shape=shape)
        note = pytest.fail if notes is None else notes.append
        return timed_attention(planned, use, shape, note=note, clock=lambda: self.now)


@pytest.fixture
def backends(monkeypatch, tmp_path):
    """Let sdpa, cudnn and flash2 be there, on a CPU and with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    backends = Backends(sdpa=3.0, cudnn=2.0, flash2=1.0)
    for name in ("cudnn", "flash2"):
        kind = replace(ATTENTION_KINDS[name], needs_cuda=False, half_only=False, library=None)
        monkeypatch.setitem(ATTENTION_KINDS, name, kind)
    monkeypatch.setattr(attention_times, "attention_backend", backends)
    monkeypatch.setattr(attention, "attention_backend", backends)
    why_unusable.cache_clear()
    yield backends
    why_unusable.cache_clear()


def test_the_fastest_is_taken_and_the_others_are_listed(backends):
    times, problems = backends.time()
    assert (times.fastest, problems) == ("flash2", [])
    assert list(times.milliseconds) == ["flash2", "cudnn", "sdpa"]
    assert times.milliseconds == pytest.approx(backends.milliseconds)
    assert times.line() == "flash2 1 ms, cudnn 2 ms, sdpa 3 ms"


def test_some_queries_stand_for_all_with_all_keys_and_heads(backends, monkeypatch):
    monkeypatch.setattr(attention_times, "_QUERIES", 70)
    backends.time()
    # One call loads kernels, and three are timed.
    assert [name for name, _ in backends.calls] == [name for name in ("sdpa", "cudnn", "flash2") for _ in range(4)]
    assert {shapes for _, shapes in backends.calls} == {((1, 3, 70, 16), (1, 3, 200, 16), (1, 3, 200, 16))}


@pytest.mark.parametrize(
    ("dtype", "off", "is_taken"),
    [(torch.float32, 1e-4, True), (torch.float32, 0.01, False), (torch.bfloat16, 0.01, True)],
)
def test_what_differs_from_math_by_more_than_the_dtype_is_not_taken(backends, dtype, off, is_taken):
    backends.computes["flash2"] = lambda q, k, v: math(q, k, v) * (1 + off)
    times, problems = backends.time(dtype=dtype)
    assert times.fastest == ("flash2" if is_taken else "cudnn")
    assert problems == ([] if is_taken else ["flash2 differs from math by 1.0%"])


def test_what_fails_on_the_shape_is_left_out_with_its_reason(backends):
    def fails(q, k, v):
        raise RuntimeError("no kernel\nfor this")

    backends.computes["flash2"] = fails
    backends.computes["cudnn"] = lambda q, k, v: q * float("nan")
    times, problems = backends.time()
    assert list(times.milliseconds) == ["sdpa"]
    assert problems == ["cudnn differs from math by nan%", "flash2: no kernel for this"]


def test_a_ring_is_timed_by_its_parts(backends, monkeypatch):
    monkeypatch.setitem(backends.milliseconds, "sdpa", 0.5)
    times, problems = backends.time(replace(SHAPE, in_parts=True))
    assert (times.fastest, problems) == ("sdpa", [])


def test_a_run_times_once_and_later_plans_know_the_answer(backends):
    choose = (AttentionChoice.AUTO, USE)
    planned = choose_attention(*choose, setting="runtime.attention", shape=SHAPE)
    assert (planned.backend, planned.candidates) == ("sdpa", ("sdpa", "cudnn", "flash2"))
    assert "they are timed when the run begins" in planned.line()
    decided = backends.decide()
    named = "auto: the fastest here for 3 heads of 16, 200 x 200 tokens: flash2 1 ms, cudnn 2 ms, sdpa 3 ms"
    assert (decided.backend, decided.reason, decided.candidates) == ("flash2", named, ())
    # Whatever would be measured by now.
    backends.milliseconds["flash2"] = 100.0
    backends.calls.clear()
    assert choose_attention(*choose, setting="runtime.attention", shape=SHAPE) == decided == backends.decide()
    assert timed_attention(planned, USE, SHAPE, note=pytest.fail) == decided
    assert backends.calls == []
    # What is asked for is neither timed nor remembered.
    assert choose_attention(AttentionChoice.CUDNN, USE, setting="runtime.attention", shape=SHAPE).backend == "cudnn"


def test_another_shape_dtype_or_version_is_timed_anew(backends, monkeypatch):
    backends.decide()

    def path(shape=SHAPE, dtype=torch.float32):
        return RememberedTimes(shape, device=CPU, dtype=dtype).path

    assert path().is_file()
    others = {path(replace(SHAPE, keys=201)), path(replace(SHAPE, in_parts=True)), path(dtype=torch.bfloat16)}
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    others.add(path())
    monkeypatch.setattr(type(ATTENTION_KINDS["flash3"].library), "version", lambda library: "9.9")
    others.add(path())
    assert len(others) == 5
    assert not any(other.exists() for other in others)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        "other device",
        {"milliseconds": {}},
        {"milliseconds": {"flash2": "fast"}},
        {"milliseconds": {"flash2": -1.0}},
        {"milliseconds": {"flash9": 1.0}},
    ],
    ids=str,
)
def test_a_file_that_is_not_ours_is_ignored_with_a_note_and_written_again(backends, content):
    backends.decide()
    path = RememberedTimes(SHAPE, device=CPU, dtype=torch.float32).path
    good = json.loads(path.read_text())
    if content == "other device":
        content = {"asked": {**good["asked"], "device": "another"}}
    path.write_text(content if isinstance(content, str) else json.dumps({**good, **content}))
    notes: list[str] = []
    assert backends.decide(notes=notes).backend == "flash2"
    [note] = notes
    assert note.startswith(f"attention: {path} is ignored: ")
    assert json.loads(path.read_text()) == good


def test_a_remembered_backend_that_does_not_work_any_more_is_not_taken(backends):
    backends.decide()
    backends.computes["flash2"] = lambda q, k, v: q
    why_unusable.cache_clear()
    decided = backends.decide()
    assert decided.backend == "cudnn"


def test_a_cache_that_cannot_be_written_changes_nothing_else(backends, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert backends.decide().backend == "flash2"


def test_where_nothing_can_be_timed_it_is_torchs_own(backends, monkeypatch):
    def no_memory(*given):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(attention_times, "_random", no_memory)
    decided = backends.decide()
    assert (decided.backend, decided.reason) == ("sdpa", "auto: nothing could be timed; out of memory")
    assert not Path(RememberedTimes(SHAPE, device=CPU, dtype=torch.float32).path).exists()


def test_a_cpu_with_one_candidate_times_nothing(monkeypatch):
    monkeypatch.setattr(attention, "time_attention", lambda *given, **named: pytest.fail("timed"))
    monkeypatch.setattr(attention, "RememberedTimes", lambda *given, **named: pytest.fail("looked for"))
    planned = choose_attention(AttentionChoice.AUTO, USE, setting="runtime.attention", shape=SHAPE)
    assert timed_attention(planned, USE, SHAPE, note=pytest.fail) == planned
    assert planned.line() == "sdpa (auto: torch's fused kernels; the others are for GPUs)"
