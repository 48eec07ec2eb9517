"""How many threads compute, and why: of affinity, quota and work."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from opensora_cli.core import threads
from opensora_cli.core.exceptions import OsoraError, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.core.threads import (
    VARIABLES,
    Cores,
    ThreadChoice,
    choose_threads,
    named_threads,
    pick_threads,
    read_quota,
    threads_used,
    variables_of_ranks,
)


@pytest.mark.parametrize(
    ("cores", "useful", "ranks", "count", "reason"),
    [
        (Cores(allowed=8), None, 1, 8, "8 cores"),
        (Cores(allowed=1), None, 1, 1, "1 core"),
        (Cores(allowed=8), 3, 1, 3, "8 cores, work for 3"),
        (Cores(allowed=8), 0, 1, 1, "8 cores, work for 1"),
        (Cores(allowed=64, quota=2.5), None, 1, 2, "64 cores, the quota is 2.5"),
        (Cores(allowed=64, quota=0.5), None, 1, 1, "64 cores, the quota is 0.5"),
        (Cores(allowed=8), None, 4, 2, "8 cores, 4 processes"),
        (Cores(allowed=2), None, 4, 1, "2 cores, 4 processes"),
        (Cores(allowed=16, quota=8.0), 2, 2, 2, "16 cores, the quota is 8, 2 processes, work for 2"),
    ],
)
def test_the_choice(cores: Cores, useful: int | None, ranks: int, count: int, reason: str) -> None:
    choice = choose_threads(cores, useful=useful, ranks=ranks)
    assert (choice.count, choice.reason, choice.is_free) == (count, reason, True)


@pytest.mark.parametrize(
    ("environment", "asked", "expected"),
    [
        ({}, None, None),
        ({"OMP_NUM_THREADS": ""}, None, None),
        ({"OMP_NUM_THREADS": "3"}, None, "3 (OMP_NUM_THREADS)"),
        ({"MKL_NUM_THREADS": "3"}, None, "3 (MKL_NUM_THREADS)"),
        ({"OMP_NUM_THREADS": "3"}, 5, "5 (as set)"),
        ({"OMP_NUM_THREADS": "3", "OSORA_RANK_THREADS": "3"}, None, None),
        ({"OMP_NUM_THREADS": "3", "OSORA_RANK_THREADS": "3"}, 5, "5 (as set)"),
        ({"OMP_NUM_THREADS": "3", "OSORA_RANK_THREADS": "2"}, None, "3 (OMP_NUM_THREADS)"),
        ({"MKL_NUM_THREADS": "3", "OSORA_RANK_THREADS": "3"}, None, "3 (MKL_NUM_THREADS)"),
    ],
)
def test_what_a_user_names_holds(environment: dict[str, str], asked: int | None, expected: str | None) -> None:
    choice = named_threads(environment, asked=asked, now=3)
    assert (None if choice is None else choice.line()) == expected
    assert choice is None or not choice.is_free


def test_ranks_choose_for_themselves_unless_a_user_has() -> None:
    variables = variables_of_ranks({"OMP_NUM_THREADS": ""}, ranks=10_000)
    assert variables == {"OMP_NUM_THREADS": "1", "OSORA_RANK_THREADS": "1"}
    assert named_threads(variables, asked=None, now=1) is None
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        assert variables_of_ranks({name: "3"}, ranks=2) == {}


def cgroup(root: Path, lines: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": lines, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        # The tightest of a group and of those that it is in.
        (
            "0::/job/step\n",
            {"sys/fs/cgroup/job/cpu.max": "200000 100000", "sys/fs/cgroup/job/step/cpu.max": "max 100000"},
            2.0,
        ),
        (
            "5:memory:/a\n4:cpu,cpuacct:/a\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            "1:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
        # In a container the path may be that of the host.
        ("0::/kubepods/pod7\n", {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4.0),
        ("nonsense\n\n", {}, None),
    ],
)
def test_quotas_of_cgroups(tmp_path: Path, lines: str, files: dict[str, str], expected: float | None) -> None:
    assert read_quota(cgroup(tmp_path, lines, files)) == expected
    assert read_quota(tmp_path / "nowhere") is None


def test_torch_computes_with_the_choice_and_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
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
    before: int, after: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
