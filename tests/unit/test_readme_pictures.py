"""The script that makes the pictures of the README."""

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
