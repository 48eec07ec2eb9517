"""The script that draws the pictures of README and pages."""

import importlib.util
from types import ModuleType

import pytest
from docs.pages import PAGES, ROOT

# A picture is loaded on a phone, too.
MOST_BYTES = 250_000


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    spec = importlib.util.spec_from_file_location("draw_pictures", ROOT / "docs" / "draw_pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_draws_every_picture_that_the_pages_show(script: ModuleType) -> None:
    folders = [ROOT / "docs" / "pictures", ROOT / "docs" / "images", ROOT / ".readme"]
    pictures = [path for folder in folders for path in folder.iterdir()]
    assert {path.stem for path in pictures} <= script.PICTURES.keys()
    assert {*script.PICTURES} <= {path.stem for path in pictures}
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in pictures if f"/{path.name}" not in texts] == []
    assert [path.name for path in pictures if path.suffix != ".gif" and path.stat().st_size > MOST_BYTES] == []
