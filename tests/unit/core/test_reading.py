"""What goes wrong while a named file is read becomes its error, with the right exit code; a bug stays one."""

import errno
import os
import resource
from pathlib import Path

import pytest

from opensora_cli.cli.errors import translate
from opensora_cli.core.exceptions import CheckpointError, FileProblem, HardwareError, OsoraError
from opensora_cli.core.reading import (
    read_bytes,
    read_json_object,
    read_text,
    reading,
    require_file,
    stays_inside,
)


def _system(number: int, name: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([name] if name else []))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (_system(errno.ENOENT), CheckpointError, "w.pt does not exist"),
        (_system(errno.EACCES), CheckpointError, "w.pt cannot be read: Permission denied"),
        (_system(errno.EACCES, "w.pt/model/shard"), CheckpointError, "w.pt/model/shard cannot be read: "),
        (_system(errno.EMFILE), HardwareError, "w.pt cannot be read: Too many open files"),
        (_system(errno.ENOMEM), HardwareError, "there is not enough memory to read w.pt"),
        (RuntimeError("could not create a primitive"), HardwareError, "there is not enough memory"),
        (RecursionError("maximum recursion depth exceeded"), CheckpointError, "w.pt is nested too deeply"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), CheckpointError, "w.pt is not text in UTF-8"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), CheckpointError, "w.pt does not exist: no file can have"),
        (ValueError("embedded null byte"), CheckpointError, "w.pt does not exist: no file can have this name"),
    ],
)
def test_what_the_set_has_in_it_names_the_file(error, kind, message):
    with pytest.raises(OsoraError) as caught, reading("w.pt", problem=CheckpointError):
        raise error
    assert type(caught.value) is kind
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("a"), TypeError("a"), CheckpointError("our own")])
def test_what_the_set_has_not_in_it_stays_as_it_is(error):
    with pytest.raises(type(error)) as caught, reading("w.pt"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (_system(errno.EACCES, "/root/w.pt"), 3),
        (_system(errno.EMFILE, "/root/w.pt"), 4),
        (_system(errno.ENOMEM), 4),
    ],
)
def test_a_refusal_of_the_system_that_no_block_expected_has_one_line(error, code):
    failure = translate(error)
    assert failure is not None
    assert failure.exit_code == code
    assert "\n" not in failure.message
    assert os.strerror(error.errno or 0) in failure.message
    assert error.filename is None or error.filename in failure.message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),  # of autograd's engine
    ],
)
def test_a_process_that_gets_no_memory_ends_with_4(error):
    failure = translate(error)
    assert failure is not None
    assert failure.exit_code == 4
    assert failure.message.startswith("there is not enough memory")


@pytest.mark.parametrize(("limit", "code"), [(2**32, 4), (resource.RLIM_INFINITY, None)])
def test_a_lost_error_is_a_lack_of_memory_under_a_limit_alone(limit, code, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, resource.RLIM_INFINITY))
    failure = translate(SystemError("<function f> returned NULL without setting an exception"))
    assert getattr(failure, "exit_code", None) == code
    assert translate(SystemError("bad argument to internal function")) is None


@pytest.mark.parametrize(
    "error", [_system(errno.ENOENT, "/root/w.pt"), _system(errno.EACCES), _system(errno.EINVAL, "w"), ValueError("a")]
)
def test_an_unexpected_error_of_any_other_kind_is_a_bug(error):
    assert translate(error) is None


def test_pipes_devices_and_folders_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "pipe"), (Path("/dev/zero"), "device"), (tmp_path, "folder")):
        for read in (require_file, read_text):
            with pytest.raises(FileProblem, match=f"{path} is not a file: it is a {kind}"):
                read(path)


def test_more_bytes_than_it_should_have_are_not_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"12345")
    assert read_bytes(path, max_bytes=5) == b"12345"
    with pytest.raises(FileProblem, match=r"a\.yaml has more than 4 bytes"):
        read_bytes(path, max_bytes=4)


def test_text_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfa")
    assert read_text(tmp_path / "a") == "a"
    (tmp_path / "a").write_bytes(b"caf\xe9")
    with pytest.raises(FileProblem, match="is not text in UTF-8"):
        read_text(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "no object"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"a": "\\ud800"}', "half a character"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"a": NaN}', "no JSON"),
        ("{", "no JSON"),
    ],
)
def test_json_is_read_strictly(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(FileProblem, match=rf"a\.json is broken: .*{message}"):
        read_json_object(path)


@pytest.mark.parametrize("name", ["n" * 5000, "a\0b", "\ud800", "a\nb"])
def test_a_name_that_no_file_has_is_one_line(name):
    with pytest.raises(FileProblem) as caught:
        read_text(name)
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.message) < 1000
    caught.value.message.encode()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("a", True), ("a/b.bin", True), ("..", False), ("a/../../b", False), ("/a", False), ("C:a", False)),
        *(("\\a", False), ("a\\..\\b", False), ("", False), ("a\nb", False), (3, False), (None, False)),
    ],
)
def test_a_name_in_a_document_stays_inside_its_folder_on_every_system(name, expected):
    assert stays_inside(name) is expected
