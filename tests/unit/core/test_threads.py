"""How many threads compute, and why: of affinity, quota and work."""

import os
from contextlib import suppress

import pytest
import torch

from opensora_cli.core import threads
from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.limits import Cores
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.threads import (
    VARIABLES,
    ThreadChoice,
    choose_threads,
    named_threads,
    pick_threads,
    threads_used,
    variables_of_ranks,
)


@pytest.mark.parametrize(
    ("cores", "useful", "ranks", "count", "reason"),
    [
        (Cores(allowed=8), None, 1, 8, "8 cores"),
        (Cores(allowed=1), None, 1, 1, "1 core"),
        (Cores(allowed=8), 0, 1, 1, "8 cores, work for 1"),
        (Cores(allowed=64, quota=2.5), None, 1, 2, "64 cores, the quota is 2.5"),
        (Cores(allowed=2), None, 4, 1, "2 cores, 4 processes"),
        (Cores(allowed=16, quota=8.0), 2, 2, 2, "16 cores, the quota is 8, 2 processes, work for 2"),
    ],
)
def test_the_choice(cores, useful, ranks, count, reason):
    choice = choose_threads(cores, useful=useful, ranks=ranks)
    assert (choice.count, choice.reason, choice.is_free) == (count, reason, True)


@pytest.mark.parametrize(
    ("environment", "asked", "expected"),
    [
        ({}, None, None),
        ({"OMP_NUM_THREADS": "3"}, None, "3 (OMP_NUM_THREADS)"),
        ({"MKL_NUM_THREADS": "3"}, None, "3 (MKL_NUM_THREADS)"),
        ({"OMP_NUM_THREADS": "3"}, 5, "5 (as set)"),
        ({"OMP_NUM_THREADS": "3", "OSORA_RANK_THREADS": "3"}, None, None),
        ({"OMP_NUM_THREADS": "3", "OSORA_RANK_THREADS": "2"}, None, "3 (OMP_NUM_THREADS)"),
        ({"MKL_NUM_THREADS": "3", "OSORA_RANK_THREADS": "3"}, None, "3 (MKL_NUM_THREADS)"),
    ],
)
def test_what_a_user_names_holds(environment, asked, expected):
    choice = named_threads(environment, asked=asked, now=3)
    assert (None if choice is None else choice.line()) == expected
    assert choice is None or not choice.is_free


def test_ranks_choose_for_themselves_unless_a_user_has():
    variables = variables_of_ranks({"OMP_NUM_THREADS": ""}, ranks=10_000)
    assert variables == {"OMP_NUM_THREADS": "1", "OSORA_RANK_THREADS": "1"}
    assert named_threads(variables, asked=None, now=1) is None
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        assert variables_of_ranks({name: "3"}, ranks=2) == {}


def test_torch_computes_with_the_choice_and_is_put_back(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "read_cores", lambda: Cores(allowed=3))
    notes: list[str] = []
    reporter = SilentReporter()
    monkeypatch.setattr(reporter, "note", notes.append)
    before = torch.get_num_threads()
    with threads_used(pick_threads(asked=None, values=2**20), reporter):
        assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), threads_used(ThreadChoice(count=2, reason="asked for"), reporter):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    assert notes == ["threads: 3 (3 cores)", "threads: 2 (asked for)"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
@pytest.mark.parametrize(("before", "after", "is_refused"), [(2, 2, True), (2, 1, False), (1, 2, False)])
def test_a_process_forked_from_one_that_computed_with_threads_is_refused_several(
    before, after, is_refused, monkeypatch
):
    monkeypatch.setattr(threads, "_computed_in", None)

    def refusal(count: int) -> OsoraError | None:
        try:
            with threads_used(ThreadChoice(count=count, reason="as set"), SilentReporter()):
                return None
        except RequestError as error:
            return error

    assert refusal(before) is None
    if not (child := os.fork()):
        code = 9
        with suppress(BaseException):
            found = refusal(after)
            is_explained = found is not None and "forked" in found.message and "spawn" in str(found.hint)
            code = 2 if is_explained else 1 if found is None else 3
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (2 if is_refused else 1)
    assert refusal(after) is None
