import json
import re
import subprocess
import sys
import time

import av
import numpy
import pytest
from PIL import Image

from opensora_cli.cli.app import main

PROMPT = 'a "red" boat & <b>sea</b>'


def write_sidecar(media, **facts):
    document = {"schema": "osora.generate/9", "bytes": media.stat().st_size, "settings": {}, **facts}
    media.with_name(f"{media.name}.json").write_text(json.dumps(document))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "re sults#1"
    (folder / "more").mkdir(parents=True)
    video, picture = folder / "a boat%.mp4", folder / "more" / "snow.png"
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=8, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in range(16):
            frame = av.VideoFrame.from_ndarray(numpy.full((48, 64, 3), shade * 16, numpy.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    write_sidecar(video, prompt=PROMPT, seed=7, num_frames=16, settings={"sampling": {"num_inference_steps": 33}})
    Image.new("RGB", (900, 300), "red").save(picture)
    write_sidecar(picture, prompt="snow falls", seed=8, num_frames=1)
    (folder / "broken.mp4").write_bytes(b"broken")
    write_sidecar(folder / "broken.mp4", prompt="broken")
    Image.new("RGB", (9, 9)).save(folder / "reference.png")
    (folder / "other.json").write_text("{}")
    return folder


def test_a_page_has_posters_settings_and_relative_paths(folder, capsys):
    assert main(["gallery", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(folder / "gallery.html")
    assert "broken.mp4 is skipped" in printed.err
    page = (folder / "gallery.html").read_text()
    assert page.count('<li class="result">') == 2
    assert 'src="./a%20boat%25.mp4"' in page
    assert 'href="./more/snow.png"' in page
    assert page.count("data:image/webp;base64,") == 2
    assert "a &quot;red&quot; boat &amp; &lt;b&gt;sea&lt;/b&gt;" in page
    assert "<b>sea" not in page
    assert "num_inference_steps" in page
    assert not re.search(r"https?://", page)


def test_a_page_elsewhere_names_the_results_from_there(folder, tmp_path, capsys):
    output = tmp_path / "page.html"
    assert main(["gallery", str(folder), "--output", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": "osora.gallery/1", "path": str(output), "results": 2}
    assert 'src="./re%20sults%231/a%20boat%25.mp4"' in output.read_text()


def test_an_existing_file_is_replaced_with_overwrite_alone(folder, capsys):
    page = folder / "gallery.html"
    page.write_text("another page")
    assert main(["gallery", str(folder)]) == 3
    assert f"{page} exists already" in capsys.readouterr().err
    assert page.read_text() == "another page"
    assert main(["gallery", str(folder), "--overwrite"]) == 0
    assert page.read_text().count('<li class="result">') == 2


def test_a_folder_without_results_and_other_endings_are_refused(tmp_path, capsys):
    assert main(["gallery", str(tmp_path)]) == 3
    assert "has no results" in capsys.readouterr().err
    assert main(["gallery", str(tmp_path / "missing")]) == 3
    assert main(["gallery", str(tmp_path), "--output", "film.mp4"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_neither_torch_nor_the_extra_is_needed(folder):
    code = (
        "import sys\n"
        "for name in ('torch', 'fastapi', 'uvicorn', 'prometheus_client', 'multipart'): sys.modules[name] = None\n"
        "from opensora_cli.cli.app import main\n"
        f"sys.exit(main(['gallery', {str(folder)!r}]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_page_filters_and_plays_in_a_browser(folder, browser):
    assert main(["gallery", str(folder)]) == 0
    page = browser.new_page(viewport={"width": 390, "height": 800})
    problems, asked = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / "gallery.html").as_uri())
    assert page.locator(".result:visible").count() == 2
    page.locator("video").hover()
    limit = time.monotonic() + 30
    while not page.evaluate("document.querySelector('video').currentTime > 0"):
        assert time.monotonic() < limit
        page.wait_for_timeout(50)
    page.keyboard.type("33 BOAT")  # the filter has the focus
    assert page.locator(".result:visible").count() == 1
    assert page.locator("#shown").inner_text() == "1 of 2 results"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert problems == []
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
