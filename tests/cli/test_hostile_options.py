"""Text that is not Unicode, a folder that may not be entered, and names that lie elsewhere: one line and an exit code.

Random values of every option, and closed folders for every command, are in `tests/hostile`.
"""

import os
from pathlib import Path

import pytest
from fake_hub import FakeRepo, connect, serving
from PIL import Image

from opensora_cli.cli.app import main


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "caf\udce9"],
        ["generate", "sea", "--set", "runtime.device=caf\udce9"],
        ["train", "--config", "demo_lora", "--device", "caf\udce9"],
    ],
)
def test_words_that_are_not_unicode_are_refused(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2
    err = capsys.readouterr().err
    assert " must be valid Unicode text" in err
    assert len(err.splitlines()) == 1


def test_a_scan_names_a_folder_that_it_may_not_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("open/closed").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save("open/a.png")
    scandir = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("closed"):  # whose rights do not keep root out
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["data", "scan", "open", "-o", "open/table.csv", "--json"]) == 5
    assert "error: 1 file or folder cannot be read: open/table.csv has the others" in capsys.readouterr().err
    assert Path("open/table.csv").read_text().count("\n") == 2


def test_names_of_a_hub_that_lie_elsewhere_and_texts_for_the_terminal_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    t5, clip = "google/t5-v1_1-xxl", "openai/clip-vit-large-patch14"
    sound = ["Open_Sora_v2.safetensors", "hunyuan_vae.safetensors"]
    sound += [f"{folder}/{name}" for folder in (t5, clip) for name in ("config.json", "model.safetensors")]
    sound += [f"{t5}/spiece.model", f"{t5}/tokenizer_config.json", f"{clip}/tokenizer.json"]
    sound += [f"{clip}/vocab.json", f"{clip}/merges.txt"]
    places = ("../../../pwned", "a/../../pwned", "x\0y", "x" * 300, "a\\..\\pwned", "é\u202e")
    elsewhere = [*(f"{t5}/{place}.json" for place in places), f"{t5}/..", "/tmp/pwned.json"]
    with serving() as hub:
        hub.repos["hpcai-tech/Open-Sora-v2"] = FakeRepo(dict.fromkeys([*sound, *elsewhere], b"x"))
        hub.listing_headers = {"X-HF-Warning": "topic; \x1b[2J\x9b31m"}
        connect(hub, monkeypatch)
        assert main(["ckpt", "download", "open-sora-v2", "--to", str(tmp_path / "got")]) == 0
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if ".cache" not in path.parts}
    assert {name for name in found if (tmp_path / name).is_file()} == {f"got/{name}" for name in sound}
    assert "\x1b[2J" not in capsys.readouterr().err
