"""The page of `osora serve` in headless Chromium."""

import time

import pytest
from served import Served, turbo_weights

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

    def run(width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
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


def ask(page, prompt, *, frames=5, steps=3):
    page.fill("#prompt", prompt)
    page.fill("#num_frames", str(frames))
    page.fill("#steps", str(steps))


def made(page, prompt, *, count=1):
    """Wait for a result, and return its element; `count` results have its prompt."""
    found = page.locator("#gallery .result", has_text=prompt)
    found.nth(count - 1).wait_for()
    return found.first


def test_a_video_is_made_and_plays(opened):
    page = opened()
    page.click("#examples button >> nth=0")
    assert page.input_value("#prompt") == "raining, sea"
    ask(page, "raining, sea")
    page.click("#submit")
    result = made(page, "raining, sea")
    result.locator("video").hover()
    until(page, "document.querySelector('#gallery video').currentTime > 0")
    result.locator("summary").click()
    assert result.locator("code").inner_text().startswith("osora generate 'raining, sea' --model demo --seed ")
    assert '"steps": "3"' in result.locator("pre").inner_text()
    result.locator("[data-do=copy]").click()


def test_the_plan_follows_what_is_typed(opened):
    page = opened()
    assert page.locator("#config option").all_inner_texts() == ["demo"]
    assert (page.input_value("#num_frames"), page.input_value("#steps")) == ("33", "30")
    plan = "document.getElementById('plan').textContent"
    page.fill("#prompt", "sea")
    until(page, f"{plan}.startsWith('Fits') && {plan}.includes('33 frames')")
    page.fill("#num_frames", "5")
    until(page, f"{plan}.includes('5 frames') && !{plan}.includes('33 frames')")
    page.fill("#num_frames", "6")
    until(page, "document.getElementById('problem').textContent.includes('num_frames')")


def test_results_are_made_again_with_another_seed_and_longer(opened):
    page = opened()
    ask(page, "three boats", frames=17)
    page.click("#submit")
    for count, button in enumerate(("again", "seed", "extend"), start=2):
        made(page, "three boats", count=count - 1).locator(f"[data-do={button}]").click()
        made(page, "three boats", count=count)
    results = page.locator("#gallery .result", has_text="three boats")
    states = [text.split(", seed ") for text in results.locator(".state").all_inner_texts()]
    lengths, seeds = zip(*states, strict=True)
    assert len(set(seeds)) == 2  # again and longer keep the seed
    assert len(set(lengths)) == 2
    for left in range(3, -1, -1):
        results.first.locator("[data-do=delete]").click()
        results.nth(left).wait_for(state="detached")


def test_a_running_video_shows_preview_progress_and_time(opened):
    page = opened()
    ask(page, "a boat in the making", steps=150)
    page.click("#submit")
    job = page.locator("#queue .job", has_text="a boat in the making")
    job.locator("img:visible").wait_for()
    until(page, "document.querySelector('#queue .job img').naturalWidth > 0")
    until(
        page,
        "document.querySelector('#queue .state').textContent.match(/denoise \\d+ of \\d+, about \\d+ (s|min) left/)",
    )
    assert page.locator("#queue progress").first.evaluate("bar => bar.value") > 0
    job.locator("[data-do=cancel]").click()
    made(page, "a boat in the making")


def test_the_queue_is_reordered_by_keys(opened):
    page = opened()
    ask(page, "first boat", steps=300)
    for prompt in ("first boat", "second boat", "third boat"):
        page.fill("#prompt", prompt)
        page.click("#submit")
        page.locator("#queue .job", has_text=prompt).wait_for()
    page.locator("#queue .job", has_text="third boat").locator("[data-do=up]").focus()
    page.keyboard.press("Enter")
    prompts = "[...document.querySelectorAll('#queue .prompt')].map((each) => each.textContent).join()"
    until(page, f"{prompts} == 'first boat,third boat,second boat'")
    assert page.evaluate("document.activeElement.closest('.job').innerText.includes('third boat')")
    page.locator("#queue .job", has_text="third boat").locator("[data-do=down]").press("Enter")
    until(page, f"{prompts} == 'first boat,second boat,third boat'")
    for prompt in ("third boat", "second boat", "first boat"):
        page.locator("#queue .job", has_text=prompt).locator("[data-do=cancel]").press("Enter")
        made(page, prompt)


def test_two_tabs_a_reload_and_a_restart_show_the_same(opened, served):
    one, two = opened(), opened()
    ask(one, "a shared boat", frames=33, steps=150)
    one.click("#submit")
    for page in (one, two):
        page.locator("#queue .job", has_text="a shared boat").wait_for()
    one.reload()
    one.locator("#queue .job", has_text="a shared boat").wait_for()
    served.process.kill()
    served.process.wait()
    two.locator("#connection:not(.on)").wait_for()
    served.start()
    for page in (one, two):
        page.wait_for_selector("#connection.on")
        page.locator("#queue .job", has_text="a shared boat").wait_for()
    two.locator("#queue .job", has_text="a shared boat").locator("[data-do=cancel]").click()
    for page in (one, two):
        made(page, "a shared boat")


def test_the_last_frame_becomes_the_reference(opened):
    page = opened()
    ask(page, "a boat that goes on")
    page.click("#submit")
    made(page, "a boat that goes on").locator("[data-do=last]").click()
    page.locator("#references img").wait_for()
    page.click("#submit")
    assert "--ref FILE" in made(page, "a boat that goes on", count=2).locator("code").text_content()


DROP = """() => new Promise((done) => {
  const canvas = document.createElement("canvas");
  canvas.getContext("2d").fillRect(0, 0, 64, 64);
  canvas.toBlob((blob) => {
    const dataTransfer = new DataTransfer();
    for (const name of ["1.png", "2.png", "3.png"]) {
      dataTransfer.items.add(new File([blob], name, { type: "image/png" }));
    }
    document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer, cancelable: true }));
    done();
  });
})"""


def test_references_are_dropped_for_each_mode(opened):
    page = opened()
    modes = page.locator("#cond option").all_inner_texts()[1:]
    assert modes == ["i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail", "v2v_head_easy", "v2v_tail_easy"]
    for mode, count in (("i2v_loop", 2), ("i2v_tail", 1)):
        page.select_option("#cond", mode)
        page.evaluate(DROP)
        assert page.locator("#references button").count() == count
        ask(page, f"a boat {mode}", frames=17)
        page.click("#submit")
        code = made(page, f"a boat {mode}").locator("code").text_content()
        assert code.count("--ref FILE") == count
        assert f"--cond {mode}" in code
    page.locator("#references button").click()
    assert page.locator("#references button").count() == 0


def test_a_phone_shows_everything_in_its_width(opened):
    page = opened(width=390, is_mobile=True, has_touch=True)
    ask(page, "x" * 200)
    page.click("#submit")
    made(page, "x" * 200)
    page.locator("#gallery summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_turbo_is_offered_once_the_model_has_a_few_step_adapter(tmp_path, browser):
    weights = turbo_weights(tmp_path / "weights")
    (weights / "turbo").rename(weights / "later")
    with Served(tmp_path / "serve", "--set", f"runtime.weights={weights}") as served:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{served.port}/")
        page.wait_for_selector("#connection.on")
        assert page.locator("label:visible", has_text="Turbo").count() == 0
        (weights / "later").rename(weights / "turbo")
        page.reload()
        page.check("#turbo")
        page.fill("#num_frames", "5")
        page.fill("#prompt", "sea")
        until(page, "document.getElementById('plan').textContent.includes('3 steps')")
        page.click("#submit")
        assert "--turbo" in made(page, "sea").locator("code").text_content()
        assert served.call("GET", "/v1/models")["data"][0]["turbo"] is True
        page.close()


def test_the_keyboard_alone_makes_a_video(opened):
    page = opened()

    def tab_to(name):
        for _ in range(80):
            if page.evaluate("document.activeElement.id") == name:
                return
            page.keyboard.press("Tab")
        raise AssertionError(name)

    for name, text in (("prompt", "keys alone"), ("num_frames", "1"), ("steps", "2")):
        tab_to(name)
        page.keyboard.press("Control+A")
        page.keyboard.type(text)
    tab_to("submit")
    page.keyboard.press("Enter")
    made(page, "keys alone")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
