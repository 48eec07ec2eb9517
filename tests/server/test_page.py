"""The page of `osora serve` in headless Chromium."""

import time

import pytest
from served import Served

pytestmark = pytest.mark.slow
LONG_MS = 30_000


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("page") / "serve") as served:
        yield served


@pytest.fixture
def opened(served, browser):
    """Return a function that opens the page, and checks afterwards that it asked no other host."""
    contexts, problems, hosts = [], [], set()

    def run(width=1200):
        context = browser.new_context(viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LONG_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("#connection.on")
        return page

    yield run
    for context in contexts:
        context.close()
    assert problems == []
    assert hosts == {f"127.0.0.1:{served.port}"}


def until(page, expression):
    """Wait for a condition; the page's policy forbids what `wait_for_function` does."""
    limit = time.monotonic() + LONG_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < limit, expression
        page.wait_for_timeout(100)


def ask(page, prompt):
    page.fill("#prompt", prompt)
    page.fill("#num_frames", "5")
    page.fill("#steps", "3")


def test_a_video_is_made_and_plays(opened):
    page = opened()
    ask(page, "raining, sea")
    until(page, "document.getElementById('plan').textContent.startsWith('Fits')")
    page.click("#submit")
    result = page.locator("#gallery .result", has_text="raining, sea").first
    result.wait_for()
    video = result.locator("video")
    video.hover()
    until(page, "document.querySelector('#gallery video').currentTime > 0")
    result.locator("summary").click()
    assert "osora generate 'raining, sea'" in result.locator("pre").inner_text()
    result.locator("[data-do=seed]").click()
    page.locator("#gallery .result", has_text="raining, sea").nth(1).wait_for()


def test_a_wrong_request_shows_its_error(opened):
    page = opened()
    ask(page, "a boat")
    page.click("summary")
    page.fill("#more", "sampling.guidance=7")
    page.click("#submit")
    until(page, "document.getElementById('problem').textContent.includes('guidance')")


def test_two_tabs_and_a_reload_show_the_same(opened, served):
    one, two = opened(), opened()
    ask(one, "a shared boat")
    one.fill("#steps", "150")
    one.click("#submit")
    for page in (one, two):
        page.locator("#queue .job", has_text="a shared boat").wait_for()
    one.reload()
    job = one.locator("#queue .job", has_text="a shared boat")
    job.wait_for()
    two.locator("#queue .job", has_text="a shared boat").locator("[data-do=cancel]").click()
    for page in (one, two):
        page.locator("#gallery .result", has_text="a shared boat").wait_for()


def test_the_last_frame_becomes_the_reference(opened):
    page = opened()
    ask(page, "a boat that goes on")
    page.click("#submit")
    result = page.locator("#gallery .result", has_text="a boat that goes on").first
    result.wait_for()
    result.locator("[data-do=last]").click()
    page.locator("#reference_shown:visible").wait_for()
    page.click("#submit")
    page.locator("#gallery .result", has_text="a boat that goes on").nth(1).wait_for()


def test_the_keyboard_alone_makes_a_video(opened):
    page = opened()
    page.focus("#prompt")
    page.keyboard.type("keys alone")
    page.fill("#num_frames", "1")
    page.fill("#steps", "2")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "submit":
            break
    page.keyboard.press("Enter")
    page.locator("#gallery .result", has_text="keys alone").wait_for()


def test_a_phone_shows_everything_in_its_width(opened):
    page = opened(width=390)
    page.locator("#gallery .result").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
