"""Servers that many tests share, and headless Chromium."""

import shutil

import pytest
from served import TOKEN, Served

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A server with one place for temporary files, `tmp` beside its folder, and a queue of three."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "tmp").mkdir()
    with Served(folder / "serve", "--max-queue", "3", TMPDIR=str(folder / "tmp")) as served:
        yield served


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text(f"{TOKEN}\n")
    with Served(folder / "serve", "--token-file", str(folder / "token"), "--max-queue", "3") as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    """A browser. Its client keeps an event loop running, which tests of other modules must not find."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()
