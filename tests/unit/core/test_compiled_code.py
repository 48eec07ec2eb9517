"""Compiled code lies where this account alone may write."""

import os
import stat
import sys
from pathlib import Path

import pytest

from opensora_cli.core import compiled_code
from opensora_cli.core.compiled_code import name_eager_cache, use_private_caches
from opensora_cli.core.exceptions import OutputError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no modes of this kind")
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "osora" / "compiled"


def mode(folder):
    return stat.S_IMODE(folder.stat().st_mode)


def of_another(tmp_path):
    """Return a folder of another account: only root can make one."""
    if os.geteuid():
        return Path("/usr")
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 65534, 65534)
    return tmp_path / "theirs"


def test_without_a_choice_it_is_a_private_folder_in_the_users_cache(cache):
    before = os.umask(0)
    try:
        variables = {"PATH": "/bin"}
        assert use_private_caches(variables) == cache / "inductor"
    finally:
        os.umask(before)
    assert variables == {"PATH": "/bin", INDUCTOR: str(cache / "inductor"), TRITON: str(cache / "triton")}
    assert [mode(folder) for folder in (cache, cache / "inductor", cache / "triton")] == [0o700] * 3


def test_the_users_choice_counts(cache, tmp_path):
    (tmp_path / "fast").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "fast")
    variables = {INDUCTOR: str(tmp_path / "link")}
    assert use_private_caches(variables) == tmp_path / "fast"  # which no change of the link changes
    assert variables[TRITON] == str(cache / "triton")


@pytest.mark.parametrize("permissions", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_may_write_is_refused(cache, tmp_path, permissions):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(permissions)
    with pytest.raises(OutputError, match=f"{shared} may be written by others") as refused:
        use_private_caches({INDUCTOR: str(shared)})
    assert refused.value.hint.endswith(f"set {INDUCTOR} to a folder of your own that nobody else may write to")


def test_a_folder_of_another_account_is_refused(cache, tmp_path):
    with pytest.raises(OutputError, match="belongs to another user") as refused:
        use_private_caches({TRITON: str(of_another(tmp_path))})
    assert f"set {TRITON} " in refused.value.hint


def test_without_a_home_it_is_a_private_temporary_folder(tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiled_code._temporary_folder.cache_clear()
    try:
        folder = use_private_caches({})
        assert folder.parent.parent == tmp_path
        assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
        assert use_private_caches({}) == folder
        variables = {}
        name_eager_cache(variables)
        assert variables == {}
    finally:
        compiled_code._temporary_folder.cache_clear()
