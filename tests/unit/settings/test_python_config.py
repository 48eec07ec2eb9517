"""The parser of Python files of settings."""

from pathlib import Path

import pytest

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.python_config import read_python_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "a.py"


def test_literals_names_and_arithmetic_are_read(config: Path) -> None:
    config.write_text(
        '"""Any description."""\n'
        "size = 10_000\n"
        "sizes = [(260 + 20) * 1024 * 1024] * 2 + [-1] * 2\n"
        "buffer = 2 * 1024**3\n"
        "half = 1 / 2 - 7 // 2\n"
        "model = dict(depth=size, axes=[8, 8], rest={'a': None, 1: (True,)})\n"
    )
    assert read_python_config(config) == {
        "size": 10_000,
        "sizes": [280 * 2**20] * 2 + [-1] * 2,
        "buffer": 2**31,
        "half": -2.5,
        "model": {"depth": 10_000, "axes": [8, 8], "rest": {"a": None, 1: (True,)}},
    }


def test_a_file_changes_its_bases_in_their_order(config: Path) -> None:
    config.with_name("one.py").write_text("a = dict(b=1, c=dict(d=2))\nonly = 1\n")
    config.with_name("two.py").write_text("a = dict(b=3)\n")
    config.write_text("_base_ = ['one.py', 'two.py']\na = dict(c=dict(_delete_=True, e=4))\n")
    assert read_python_config(config) == {"a": {"b": 3, "c": {"e": 4}}, "only": 1}


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "seed = __import__('os').getpid()",
        "seed = open('/etc/passwd').read()",
        "seed = [x for x in range(3)]",
        "model = dict(**{'a': 1})",
        "model = {**{'a': 1}}",
        "model['a'] = 1",
        "seed = unknown",
        "def f(): pass",
        "seed = f'{1}'",
        "seed = '%999999999d' % 1",
    ],
)
def test_nothing_is_executed(config: Path, line: str) -> None:
    config.write_text(f"outputs = 'out'\n{line}\n")
    with pytest.raises(FileProblem, match=r"line 2: "):
        read_python_config(config)


@pytest.mark.parametrize(
    "lines",
    [
        "a = 9 ** 9 ** 9",
        "a = 10**30 * 10**30",
        "a = [0] * 10 ** 9",
        "a = 10 ** 9 * 'x'",
        "a = 1 / 0",
        "a = -'x'",
        "a = {[]: 1}",
        "a = [0, 0]\n" + "a = [a, a]\n" * 30,
        "a = 'xx'\n" + "a = a + a\n" * 40,
        "a = 1\n" + "a = dict(a=a)\n" * 2000,
    ],
    ids=lambda lines: lines.splitlines()[-1],
)
def test_values_that_would_take_all_memory_or_are_none(config: Path, lines: str) -> None:
    config.write_text(lines)
    with pytest.raises(FileProblem, match=r"a\.py, line \d+: "):
        read_python_config(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = (", "is not Python"),
        (b"a = " + b"(" * 5000 + b")" * 5000, "is not Python"),
        (b"_base_ = 3", "_base_ must be the name of a file"),
        (b"_base_ = 'a.py'", "has itself as a base"),
        (b"_base_ = 'none.py'", "none.py does not exist"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files(config: Path, content: bytes, message: str) -> None:
    config.write_bytes(content)
    with pytest.raises(FileProblem, match=message):
        read_python_config(config)
