"""How much memory and processor time a process can have: of the machine, its groups and their page cache."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from opensora_cli.core import limits
from opensora_cli.core.limits import PrivateMemory, read_cores, read_private_memory

MIB = 2**20
MACHINE = PrivateMemory(free_bytes=900 * MIB, total_bytes=1000 * MIB)
UNLIMITED_V1 = "9223372036854771712"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=MACHINE.free_bytes, total=MACHINE.total_bytes)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: memory)


def tree(root: Path, lines: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": lines, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def v2(place: str, *, limit: str, used: int, high: str = "max", stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/{place}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{used * MIB}\n",
        f"{folder}/memory.stat": stat,
    }


def v1(place: str, *, limit: str, used: int, stat: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{place}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used * MIB}\n",
        f"{folder}/memory.stat": stat,
    }


def mib(count: int) -> str:
    return str(count * MIB)


@pytest.mark.parametrize(
    ("lines", "files", "free", "total"),
    [
        pytest.param("0::/\n", v2("", limit="max", used=300), 900, 1000, id="no limit"),
        pytest.param("0::/\n", v2("", limit=mib(500), used=300), 200, 500, id="v2"),
        pytest.param("0::/\n", v2("", limit=mib(500), high=mib(400), used=300), 100, 400, id="memory.high"),
        pytest.param("0::/\n", v2("", limit=mib(500), high=mib(400), used=450), 0, 400, id="over memory.high"),
        pytest.param("0::/\n", v2("", limit=mib(5000), used=100), 900, 1000, id="a limit over the machine"),
        pytest.param(
            "0::/job/step\n",
            {**v2("job", limit=mib(600), used=500), **v2("job/step", limit=mib(700), used=100)},
            100,
            600,
            id="the tightest of nested groups",
        ),
        pytest.param("0::/kubepods/pod7\n", v2("", limit=mib(500), used=100), 400, 500, id="the host's path"),
        pytest.param(
            "0::/\n",
            v2(
                "",
                limit=mib(500),
                used=480,
                stat=f"anon {mib(50)}\nactive_file {mib(300)}\ninactive_file {mib(100)}\n"
                f"file_dirty {mib(20)}\nfile_writeback {mib(10)}\nslab_reclaimable {mib(5)}\n",
            ),
            395,
            500,
            id="page cache is free, but for what must be written",
        ),
        pytest.param("4:memory:/a\n", v1("a", limit=mib(500), used=300), 200, 500, id="v1"),
        pytest.param("4:memory:/a\n0::/\n", v1("a", limit=UNLIMITED_V1, used=300), 900, 1000, id="v1 without a limit"),
        pytest.param(
            "4:cpu,memory:/a/b\n", {**v1("a", limit=mib(400), used=350), **v1("a/b", limit=mib(800), used=1)}, 50, 400,
            id="nested v1",
        ),
        pytest.param(
            "4:memory:/\n",
            v1("", limit=mib(500), used=480, stat=f"cache 1\ntotal_active_file {mib(200)}\n"
               f"total_inactive_file {mib(150)}\ntotal_dirty {mib(50)}\n"),
            320,
            500,
            id="page cache of v1",
        ),
        pytest.param("nonsense\n\n", {}, 900, 1000, id="nothing is said"),
        pytest.param("0::/\n", {"sys/fs/cgroup/memory.max": "12 monkeys", "sys/fs/cgroup/memory.current": ""}, 900,
                     1000, id="no numbers"),
    ],
)  # fmt: skip
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
    found = tree(tmp_path, lines, {f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert read_cores(found).quota == expected


def test_without_groups_it_is_the_machines(tmp_path):
    assert read_private_memory(tmp_path / "nowhere") == MACHINE
    assert read_cores(tmp_path / "nowhere").quota is None
