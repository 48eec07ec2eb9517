"""The script that makes the pictures of the README."""

import subprocess
from types import SimpleNamespace

import pytest
import readme_pictures


def test_every_picture_is_shown_with_its_prompt() -> None:
    prompts = readme_pictures.shown_prompts()
    assert {f"{name}.gif" for name in prompts} == {picture.name for picture in readme_pictures.PICTURES.glob("*.gif")}
    assert "raining, sea" in prompts.values()


def test_pages_may_not_describe_a_picture_differently(tmp_path) -> None:
    pages = [tmp_path / "one.md", tmp_path / "other.md"]
    pages[0].write_text('<img src=".readme/boat.gif" width="192" alt="a red boat">', encoding="utf-8")
    pages[1].write_text("![a red boat](pictures/boat.gif)", encoding="utf-8")
    assert readme_pictures.shown_prompts(pages) == {"boat": "a red boat"}
    pages[1].write_text("![a blue boat](pictures/boat.gif)", encoding="utf-8")
    with pytest.raises(ValueError, match=r"boat\.gif is described as 'a red boat' and as 'a blue boat'"):
        readme_pictures.shown_prompts(pages)


def test_what_is_asked_for_is_made_until_one_fails(monkeypatch) -> None:
    run = []

    def remember(command, **options):
        run.append(command)
        return SimpleNamespace(returncode=len(run) - 1)

    monkeypatch.setattr(subprocess, "run", remember)
    assert readme_pictures.main(["--only", "red-boat"]) == 0
    assert run[0][3:5] == ["generate", "a red boat moving left on the sea at night"]
    assert readme_pictures.main(["--seed", "3"]) == 1
    assert len(run) == 2
    assert run[1][run[1].index("--seed") + 1] == "3"


@pytest.mark.slow
def test_a_picture_is_made(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(readme_pictures, "PICTURES", tmp_path)
    assert readme_pictures.main(["--only", "red-boat"]) == 0
    assert (tmp_path / "red-boat.gif").read_bytes().startswith(b"GIF8")
