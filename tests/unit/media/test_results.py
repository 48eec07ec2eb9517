"""A result, its sidecar and its extras appear together; what a kill leaves is finished by the same call."""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import killing
import pytest

from opensora_cli.core import files
from opensora_cli.core.exceptions import OutputError
from opensora_cli.media import results
from opensora_cli.media.results import (
    Extra,
    conflicting_file,
    published,
    read_sidecar,
    refuse_existing,
    result_bytes,
    sidecar_path,
)


def publish(
    media: Path, content: str, *, replace: bool = False, folder: bool = False, replace_extra: bool = False
) -> None:
    """Publish a result of one file, or of a folder with two, whose sidecar and extra have the content too."""
    document = {"schema": "osora.test/1", "content": content}
    extra = Extra(extra_path(media), content.encode(), replace or replace_extra)
    with published(
        media, replace=replace, describe=lambda size: {**document, "bytes": size}, extras=lambda: [extra]
    ) as temporary:
        if folder:
            temporary.mkdir()
            (temporary / "frame_0001.png").write_text(content)
            (temporary / "frame_0002.png").write_text(content)
        else:
            temporary.write_text(content)


def extra_path(media: Path) -> Path:
    return media.with_name("extra.txt")


def state(media: Path) -> str:
    """Return what is there: a content where all is whole, `... media` or `... sidecar` alone, or nothing."""
    document = read_sidecar(sidecar_path(media))
    if not os.path.lexists(media):
        assert document or not sidecar_path(media).exists()
        return f"{document['content']} sidecar" if document else "nothing"
    files = [media] if media.is_file() else sorted(media.iterdir())
    assert len(files) == (2 if media.is_dir() else 1)
    (content,) = {file.read_text() for file in files}
    if document["bytes"] != result_bytes(media):
        return f"{content} media"
    assert document["content"] == content
    if extra_path(media).exists():
        assert extra_path(media).read_text() == content
    return content


def states_of_killed(work: Path, new: str, *, folder: bool, over_old: bool) -> list[str]:
    """Return what was there after each death; what was unfinished has been finished by the same call."""
    media, found = work / "a.mp4", list[str]()

    def prepare() -> None:
        shutil.rmtree(work, ignore_errors=True)
        if over_old:
            publish(media, "old", folder=folder)

    def check() -> None:
        found.append(state(media))
        if found[-1] not in ("old", new):
            publish(media, new, replace=over_old, folder=folder, replace_extra=found[-1].endswith("sidecar"))
            assert state(media) == new
        visible = [path.name for path in work.iterdir() if not path.name.startswith(".osora-")]
        assert sorted(visible) == [media.name, sidecar_path(media).name, extra_path(media).name]

    killing.kill_at_every_step(prepare, lambda: publish(media, new, replace=over_old, folder=folder), check)
    return found


KILLS = {
    ("file", "nothing", "new"): ["nothing", "new sidecar", "new"],
    ("folder", "old", "newer"): ["old", "newer media", "newer"],
    # The old sidecar gives the size of the new media, and loses it first.
    ("file", "old", "new"): ["old", "old media", "new media", "new"],
}
"""Kind, what is there before, and what is written -> the states that kills leave, in their order."""


def test_a_kill_at_any_step_leaves_media_that_are_whole_or_none(tmp_path):
    for found, order in zip(killing.run_script(__file__, tmp_path / "work"), KILLS.values(), strict=True):
        assert len(found) > 10
        assert found == sorted(found, key=order.index)
        assert set(found) == set(order)


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_at(name: str) -> Callable[..., None]:
    """Return a `take_name` that fails once for files of this name."""
    take_name, failed = results.take_name, list[str]()

    def take(unnamed: Path, target: Path, **options: bool) -> None:
        if target.name == name and not failed:
            failed.append(name)
            no_space()
        take_name(unnamed, target, **options)

    return take


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("before", ["nothing", "old", "older"])
@pytest.mark.parametrize("name", ["a.mp4", "a.mp4.json", "extra.txt"])
def test_a_step_that_fails_is_undone(tmp_path, monkeypatch, name, before, folder):
    media = tmp_path / "a.mp4"
    if before != "nothing":
        publish(media, before, folder=folder)
    there = killing.tree(tmp_path)
    monkeypatch.setattr(results, "take_name", failing_at(name))
    with pytest.raises(OutputError, match=f"cannot write .*{name}: No space left"):
        publish(media, "new", replace=before != "nothing", folder=folder)
    assert killing.tree(tmp_path) == there
    publish(media, "new", replace=before != "nothing", folder=folder)
    assert state(media) == "new"


def test_where_names_cannot_be_swapped_new_media_stay_when_a_later_step_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_swap_in_one_step", lambda *_: False)
    media = tmp_path / "a.mp4"
    publish(media, "old")
    monkeypatch.setattr(results, "take_name", failing_at("a.mp4.json"))
    with pytest.raises(OutputError, match="No space left"):
        publish(media, "newer", replace=True)
    assert state(media) == "newer media"
    publish(media, "newer", replace=True)
    assert state(media) == "newer"
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "a.mp4.json", "extra.txt"]


def test_an_extra_of_others_is_kept(tmp_path):
    media = tmp_path / "a.mp4"
    extra_path(media).write_text("theirs")
    with pytest.raises(OutputError, match=r"extra\.txt exists already"):
        publish(media, "mine")
    assert killing.tree(tmp_path) == {"extra.txt": b"theirs"}


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_waits_until_both_have_their_names(tmp_path, monkeypatch):
    take_name = results.take_name

    def interrupted(*names: Path, **options: bool) -> None:
        signal.raise_signal(signal.SIGINT)
        take_name(*names, **options)

    monkeypatch.setattr(results, "take_name", interrupted)
    for content in ("old", "new"):
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path / "a.mp4", content, replace=True)
        assert state(tmp_path / "a.mp4") == content
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "a.mp4.json", "extra.txt"]


@pytest.mark.parametrize("name", ["a.mp4", "a.mp4.json"])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_others_made_is_kept_unless_it_is_to_be_replaced(tmp_path, name, meanwhile):
    media, theirs = tmp_path / "a.mp4", tmp_path / name

    def write(*, replace: bool) -> None:
        def describe(size: int) -> dict[str, object]:
            theirs.write_text("theirs")
            return {"schema": "osora.test/1", "content": "mine", "bytes": size}

        with published(media, replace=replace, describe=describe) as temporary:
            temporary.write_text("mine")

    if not meanwhile:
        theirs.write_text("theirs")
    with pytest.raises(OutputError, match=f"{name} exists already") as caught:
        write(replace=False)
    assert caught.value.hint == "use --overwrite, or another --out"
    assert theirs.read_text() == "theirs"
    assert os.listdir(tmp_path) == [name]
    write(replace=True)
    assert state(media) == "mine"


@pytest.mark.parametrize("before", ["pair", "sidecar", "theirs"])
def test_where_no_sidecar_is_wanted_an_old_one_goes(tmp_path, monkeypatch, before):
    media, sidecar = tmp_path / "a.mp4", tmp_path / "a.mp4.json"
    publish(media, "old")
    if before == "theirs":
        sidecar.write_text("theirs")
    elif before == "sidecar":
        media.unlink()
    there = killing.tree(tmp_path)

    def write() -> None:
        with published(media, replace=before != "sidecar", describe=lambda _: None) as temporary:
            temporary.write_text("new")

    with monkeypatch.context() as patch:
        patch.setattr(results, "take_name", no_space)
        with pytest.raises(OutputError, match="No space left"):
            write()
    assert killing.tree(tmp_path) == there
    write()
    kept = {"a.mp4.json": b"theirs"} if before == "theirs" else {}
    assert killing.tree(tmp_path) == {"a.mp4": b"new", "extra.txt": b"old", **kept}


@pytest.mark.parametrize("folder", [False, True])
def test_a_folder_never_gives_way_to_a_file_nor_a_file_to_a_folder(tmp_path, folder):
    media = tmp_path / "a"
    publish(media, "old", folder=not folder)
    with pytest.raises(OutputError, match="is no result of this format"):
        publish(media, "new", replace=True, folder=folder)
    assert state(media) == "old"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.json", "extra.txt"]


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("folder", [False, True])
def test_what_a_link_points_to_stays(tmp_path, folder):
    media = tmp_path / "out" / "a"
    publish(tmp_path / "mine", "old", folder=folder)
    media.parent.mkdir()
    media.symlink_to(tmp_path / "mine")
    publish(media, "new", replace=True, folder=folder)
    assert not media.is_symlink()
    assert (state(media), state(tmp_path / "mine")) == ("new", "old")


def test_only_a_sidecar_of_ours_is_in_nobodys_way(tmp_path):
    media, sidecar = tmp_path / "a.mp4", tmp_path / "a.mp4.json"
    publish(media, "old")
    ours = sidecar.read_text()
    assert conflicting_file(media, sidecar) == conflicting_file(media, None) == media
    media.unlink()
    assert conflicting_file(media, sidecar) is None
    refuse_existing(media, sidecar)
    for text in ("", "{", "[]", "[" * 100_000, '{"schema": "osora.test/1"}', ours.replace("osora.", "other.")):
        sidecar.write_text(text)
        assert (conflicting_file(media, sidecar), conflicting_file(media, None)) == (sidecar, None)
    sidecar.unlink()
    sidecar.mkdir()
    assert conflicting_file(media, sidecar) == sidecar


if __name__ == "__main__":
    os.fsync = lambda _: None  # a killed process loses nothing that it wrote: why wait
    work = Path(sys.argv[1])
    states = [
        states_of_killed(work, new, folder=kind == "folder", over_old=before == "old") for kind, before, new in KILLS
    ]
    print(json.dumps(states))
