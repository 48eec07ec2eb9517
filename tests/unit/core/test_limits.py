"""How much memory and processor time a process can have, and how many threads compute: of the machine, its groups and
their page cache, and the work.
"""

from types import SimpleNamespace

import pytest
import torch

from opensora_cli.core import limits
from opensora_cli.core.limits import (
    VARIABLES,
    PrivateMemory,
    ThreadChoice,
    choose_threads,
    named_threads,
    pick_threads,
    read_cores,
    read_private_memory,
    threads_used,
    variables_of_ranks,
)
from opensora_cli.core.progress import SilentReporter

MIB = 2**20
MACHINE = PrivateMemory(free_bytes=900 * MIB, total_bytes=1000 * MIB)
CACHE_V2 = {"anon": 50, "active_file": 300, "inactive_file": 100, "slab_reclaimable": 5}
CACHE_V2 |= {"file_dirty": 20, "file_writeback": 10}
HUGE = "9223372036854771712"
CACHE_V1 = {"cache": 1, "total_active_file": 200, "total_inactive_file": 150, "total_dirty": 50}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    memory = SimpleNamespace(available=MACHINE.free_bytes, total=MACHINE.total_bytes)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: memory)


def tree(root, lines, files):
    """Write the groups of a process, and the files in `sys/fs/cgroup`, of numbers in MiB or of text."""
    written = {"proc/self/cgroup": lines, **{f"sys/fs/cgroup/{name}": content for name, content in files.items()}}
    for name, content in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content * MIB}\n" if isinstance(content, int) else content)
    return root


def v2(place, *, limit, used, high="max\n", cache=None):
    stat = "".join(f"{name} {size * MIB}\n" for name, size in (cache or {}).items())
    files = {"max": limit, "high": high, "current": used, "stat": stat}
    return {f"{place}memory.{name}": content for name, content in files.items()}


def v1(place, *, limit, used, cache=None):
    stat = "".join(f"{name} {size * MIB}\n" for name, size in (cache or {}).items())
    files = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}
    return {f"memory/{place}memory.{name}": content for name, content in files.items()}


TWO_V2 = {**v2("job/", limit=600, used=500), **v2("job/step/", limit=700, used=100)}
TWO_V1 = {**v1("a/", limit=400, used=350), **v1("a/b/", limit=800, used=1)}


@pytest.mark.parametrize(
    ("lines", "files", "free", "total"),
    [
        pytest.param("0::/\n", v2("", limit=500, used=300), 200, 500, id="v2"),
        pytest.param("0::/\n", v2("", limit=500, high=400, used=300), 100, 400, id="memory.high"),
        pytest.param("0::/job/step\n", TWO_V2, 100, 600, id="the tightest of nested groups"),
        pytest.param("0::/kubepods/pod7\n", v2("", limit=500, used=100), 400, 500, id="the host's path"),
        pytest.param("0::/\n", v2("", limit=500, used=480, cache=CACHE_V2), 395, 500, id="page cache is free"),
        pytest.param("4:memory:/a\n", v1("a/", limit=500, used=300), 200, 500, id="v1"),
        pytest.param("4:memory:/a\n0::/\n", v1("a/", limit=HUGE, used=300), 900, 1000, id="no limit of v1"),
        pytest.param("4:cpu,memory:/a/b\n", TWO_V1, 50, 400, id="nested v1"),
        pytest.param("4:memory:/\n", v1("", limit=500, used=480, cache=CACHE_V1), 320, 500, id="page cache of v1"),
        pytest.param("nonsense\n\n", {}, 900, 1000, id="nothing is said"),
        pytest.param("0::/\n", {"memory.max": "12 monkeys", "memory.current": ""}, 900, 1000, id="no numbers"),
    ],
)
def test_the_least_counts(tmp_path, lines, files, free, total):
    found = read_private_memory(tree(tmp_path, lines, files))
    assert found == PrivateMemory(free_bytes=free * MIB, total_bytes=total * MIB)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        # The tightest of a group and of those that it is in.
        ("0::/job/step\n", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}, 2.0),
        (
            "5:memory:/a\n4:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_quotas_of_processor_time(tmp_path, lines, files, expected):
    assert read_cores(tree(tmp_path, lines, files))[1] == expected


def test_without_groups_it_is_the_machines(tmp_path):
    assert read_private_memory(tmp_path / "nowhere") == MACHINE
    assert read_cores(tmp_path / "nowhere")[1] is None


@pytest.mark.parametrize(
    ("cores", "useful", "ranks", "count", "reason"),
    [
        ((8, None), None, 1, 8, "8 cores"),
        ((1, None), None, 1, 1, "1 core"),
        ((8, None), 0, 1, 1, "8 cores, work for 1"),
        ((64, 2.5), None, 1, 2, "64 cores, the quota is 2.5"),
        ((2, None), None, 4, 1, "2 cores, 4 processes"),
        ((16, 8.0), 2, 2, 2, "16 cores, the quota is 8, 2 processes, work for 2"),
    ],
)
def test_the_choice(cores, useful, ranks, count, reason):
    choice = choose_threads(*cores, useful=useful, ranks=ranks)
    assert (choice.count, choice.reason, choice.is_free) == (count, reason, True)


@pytest.mark.parametrize(
    ("environment", "asked", "expected"),
    [
        ({}, None, None),
        ({"OMP_NUM_THREADS": "3"}, None, "3 (OMP_NUM_THREADS)"),
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
    monkeypatch.setattr(limits, "read_cores", lambda: (3, None))
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
