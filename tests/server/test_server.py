"""`osora serve` as a whole: processes, files and answers."""

import io
import json
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from PIL import Image
from served import SMALL, Served

BOUNDARY = "a-boundary"


def form(**parts):
    """Return the body and headers of a form; a part of bytes is a file."""
    lines = []
    for name, value in parts.items():
        is_file = isinstance(value, bytes)
        file = '; filename="../../upload.png"' if is_file else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        lines.append(head + (value if is_file else value.encode()) + b"\r\n")
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={BOUNDARY}"


def picture(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("served") / "serve", "--max-queue", "3") as served:
        yield served


def test_a_video_is_made_shown_and_deleted(served):
    video_id = served.make()
    video = served.finished(video_id)
    assert (video["status"], video["progress"], video["error"], video["object"]) == ("completed", 100, None, "video")
    assert served.call("GET", "/v1/videos?limit=1")["data"][0]["id"] == video_id
    kinds = {"video": b"ftyp", "thumbnail": b"WEBP", "spritesheet": b"JFIF"}
    for variant, magic in kinds.items():
        status, _, content = served.request("GET", f"/v1/videos/{video_id}/content?variant={variant}")
        assert (status, magic in content[:12]) == (200, True)
    status, headers, part = served.request("GET", f"/v1/videos/{video_id}/content", range="bytes=4-7")
    assert (status, part) == (206, b"ftyp")
    assert "default-src 'none'" in headers["content-security-policy"]
    remixed = served.call("POST", f"/v1/videos/{video_id}/remix", {"prompt": "snow"})
    assert (remixed["remixed_from_video_id"], remixed["num_frames"], remixed["prompt"]) == (video_id, 5, "snow")
    served.finished(remixed["id"])
    assert served.call("DELETE", f"/v1/videos/{video_id}") == {
        "id": video_id,
        "deleted": True,
        "object": "video.deleted",
    }
    assert served.error("GET", f"/v1/videos/{video_id}")[0] == 404
    assert not (served.folder / "jobs" / video_id).exists()


def test_a_reference_is_uploaded_and_its_name_is_not_used(served):
    body, kind = form(prompt="a boat", settings=json.dumps(SMALL), input_reference=picture(200, 100))
    video = served.call("POST", "/v1/videos", body, content_type=kind)
    assert served.finished(video["id"])["status"] == "completed"
    names = {path.name for path in (served.folder / "jobs" / video["id"]).iterdir()}
    assert any(name.startswith("reference_") for name in names)
    assert not any("upload" in name for name in names)


def test_a_remix_keeps_its_reference_when_the_first_video_is_deleted(served):
    body, kind = form(prompt="a boat", settings=json.dumps(SMALL), input_reference=picture(200, 100))
    first = served.call("POST", "/v1/videos", body, content_type=kind)["id"]
    running = served.make(settings={"steps": 100})
    remixed = served.call("POST", f"/v1/videos/{first}/remix", {"prompt": "a ship"})
    assert remixed["has_reference"]
    served.call("DELETE", f"/v1/videos/{first}")
    served.call("DELETE", f"/v1/videos/{running}")
    assert served.finished(remixed["id"])["status"] == "completed"


@pytest.mark.parametrize("content", [b"no picture", picture(40, 40)[:60], b"\x00\x00\x00\x18ftypmp42" + bytes(100)])
def test_what_is_no_picture_or_video_is_refused(served, content):
    body, kind = form(prompt="a boat", input_reference=content)
    before = set((served.folder / "jobs").iterdir())
    status, error = served.error("POST", "/v1/videos", body, content_type=kind)
    assert (status, error["code"]) == (400, "media_error")
    assert set((served.folder / "jobs").iterdir()) == before


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/videos", b"{", 400, "invalid_json"),
        ("POST", "/v1/videos", b"[]", 400, "invalid_json"),
        ("POST", "/v1/videos", b" " * 2**21, 413, "too_large"),
        ("POST", "/v1/videos", {}, 400, "invalid_field"),
        ("POST", "/v1/videos", {"prompt": "sea", "input_reference": "/etc/passwd"}, 400, "invalid_reference"),
        ("GET", "/v1/videos?limit=0", None, 400, "invalid_value"),
        ("GET", "/v1/videos?after=video_0", None, 404, "not_found"),
        ("GET", "/v1/videos/video_0", None, 404, "not_found"),
        ("GET", "/v1/videos/..%2f..%2fetc", None, 404, "not_found"),
        ("GET", "/nothing", None, 404, "not_found"),
        ("PUT", "/v1/videos", {}, 405, "method_not_allowed"),
    ],
)
def test_wrong_requests_are_answered_with_their_error(served, method, path, body, status, code):
    found, error = served.error(method, path, body)
    assert (found, error["code"], error["type"]) == (status, code, "invalid_request_error")


def test_a_plan_is_that_of_a_dry_run(served):
    plan = served.call("POST", "/v1/plan", {"prompt": "sea", "settings": {"num_frames": 5}})
    assert plan["lines"][0].startswith("Fits: ")
    assert plan["plan"]["schema"].startswith("osora.")


def test_the_queue_is_bounded_moved_and_cancelled(served):
    running = served.make(settings={"steps": 200})
    served.until(running, lambda video: video["stage"].get("stage") == "denoise")
    waiting = [served.make() for _ in range(3)]
    assert served.call("GET", f"/v1/videos/{waiting[2]}")["place"] == 3
    status, headers, _ = served.request("POST", "/v1/videos", {"prompt": "sea"})
    assert (status, headers["retry-after"]) == (429, "30")
    assert served.call("POST", f"/v1/videos/{waiting[2]}/move", {"before": waiting[0]})["place"] == 1
    assert served.call("POST", f"/v1/videos/{waiting[0]}/cancel")["status"] == "cancelled"
    assert served.error("POST", f"/v1/videos/{waiting[0]}/cancel")[0] == 400
    assert served.error("GET", f"/v1/videos/{waiting[1]}/content")[0] == 409
    served.call("POST", f"/v1/videos/{running}/cancel")
    assert served.finished(running)["status"] == "cancelled"
    for video_id in waiting[1:]:
        assert served.finished(video_id)["status"] == "completed"


def test_events_tell_of_progress_and_the_end(served):
    video_id = served.make()
    _, _, text = served.request("GET", f"/v1/videos/{video_id}/events")
    states = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: ")]
    assert states[0]["event"] == "state"
    assert states[-1]["status"] == "completed"
    assert "denoise" in {state["progress"]["stage"] for state in states if state["event"] == "progress"}


def test_metrics_count_jobs(served):
    text = served.request("GET", "/metrics")[2].decode()
    assert 'osora_jobs{status="completed"}' in text
    assert "osora_queue_length 0.0" in text


def test_the_page_and_its_parts_are_there(served):
    for path in ("/", "/style.css", "/page.js", "/docs", "/login", "/openapi.json"):
        status, headers, body = served.request("GET", path)
        assert (status, headers["content-security-policy"] is None, b"http://" in body) == (200, False, False), path


def test_a_second_server_on_the_folder_is_refused(served):
    words = ["serve", "--model", "demo", "--folder", str(served.folder), "--port", "1024"]
    done = subprocess.run([sys.executable, "-m", "opensora_cli", *words], capture_output=True, text=True)
    assert done.returncode == 3
    assert "has a server already" in done.stderr


def test_a_token_is_needed_and_kept_in_a_cookie(tmp_path):
    token = tmp_path / "token"
    token.write_text("a-secret-of-letters\n")
    with Served(tmp_path / "serve", "--token-file", str(token)) as served:
        assert served.error("GET", "/v1/videos")[0] == 401
        assert served.call("GET", "/v1/videos", authorization="Bearer a-secret-of-letters")["data"] == []
        form_kind = "application/x-www-form-urlencoded"
        assert served.error("POST", "/login", b"token=wrong", content_type=form_kind)[0] == 401
        assert "a-secret" not in served.log.read_text()


@pytest.mark.slow
def test_a_video_is_the_same_after_any_process_was_killed(tmp_path):
    settings = {"num_frames": 17, "steps": 12}
    with Served(tmp_path / "serve") as served:
        whole = served.make(settings=settings)
        assert served.finished(whole)["status"] == "completed"
        for number, killed in enumerate(("worker", "server", "both", "term") * 5):
            video_id = served.make(settings=settings)
            step = number % 10 + 1
            served.until(
                video_id,
                lambda video, step=step: (
                    (video["stage"].get("stage") == "denoise" and video["stage"]["done"] >= step)
                    or video["status"] == "completed"
                ),
            )
            children = served.children()
            if killed in ("server", "both"):
                served.process.kill()
            if killed in ("worker", "both"):
                for child in children:
                    child.kill()
            if killed == "term":
                served.process.send_signal(signal.SIGTERM)
            if killed != "worker":
                served.process.wait(60)
                served.start()
            assert served.finished(video_id)["status"] == "completed"
            assert served.result(video_id) == served.result(whole), killed


def is_running(video):
    return video["status"] == "in_progress" and video["stage"].get("stage") == "denoise" and video["stage"]["done"] > 0


@pytest.mark.slow
def test_a_job_that_kills_its_worker_fails_and_the_next_is_made(tmp_path):
    with Served(tmp_path / "serve") as served:
        deadly, other = served.make(settings={"steps": 200}), served.make()
        for _ in range(3):  # restarts of the server are no fault of the job
            served.until(deadly, is_running)
            served.process.kill()
            served.process.wait()
            served.start()
        for _ in range(3):
            served.until(deadly, is_running)
            for child in served.children():
                child.kill()
            served.until(deadly, lambda video: not is_running(video))
        video = served.finished(deadly)
        assert (video["status"], video["error"]["code"]) == ("failed", "worker_died")
        assert served.finished(other)["status"] == "completed"


@pytest.mark.slow
def test_groups_work_at_the_same_time_and_one_survives_the_end_of_another(tmp_path):
    with Served(tmp_path / "serve", "--groups", "2") as served:
        videos = [served.make(settings={"steps": 300}) for _ in range(3)]
        for video_id in videos[:2]:
            served.until(video_id, is_running)
        assert served.call("GET", f"/v1/videos/{videos[2]}")["place"] == 1
        workers = [child for child in served.children() if "videos" in child.cmdline()]
        assert len(workers) == 2
        workers[0].kill()
        hit = None
        while hit is None:
            hit = next((each for each in videos[:2] if served.call("GET", f"/v1/videos/{each}")["place"]), None)
        other = next(each for each in videos[:2] if each != hit)
        before = served.call("GET", f"/v1/videos/{other}")["stage"]["done"]
        assert served.until(other, lambda video: video["stage"]["done"] > before)["status"] == "in_progress"
        served.until(hit, is_running)
        for video_id in videos:
            served.call("DELETE", f"/v1/videos/{video_id}")


@pytest.mark.slow
def test_many_posts_at_once_are_all_answered(tmp_path):
    with Served(tmp_path / "serve", "--max-queue", "50") as served:
        found = []
        body = {"prompt": "sea", "settings": {"num_frames": 1, "steps": 1}}
        threads = [
            threading.Thread(target=lambda: found.append(served.request("POST", "/v1/videos", body)[0]))
            for _ in range(200)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(found) <= {200, 429}
        assert len(found) == 200
        assert 50 <= found.count(200) <= 120


@pytest.mark.slow
def test_a_full_disk_fails_the_job_with_its_reason(tmp_path):
    if shutil.disk_usage("/dev/shm").total < 2**20:
        pytest.skip("needs a small file system of its own")
    with Served(tmp_path / "serve") as served:
        video_id = served.make(settings={"steps": 200})
        served.until(video_id, lambda video: video["stage"].get("stage") == "denoise")
        folder = served.folder / "jobs" / video_id
        folder.rename(tmp_path / "gone")  # every write fails from now on
        folder.write_text("no folder")
        video = served.finished(video_id)
        assert video["status"] == "failed"
        assert video["error"]["message"]
        folder.unlink()
        other = served.make()
        assert served.finished(other)["status"] == "completed"
