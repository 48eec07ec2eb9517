"""`osora serve` as a whole: processes, files and answers."""

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest
from served import SMALL, TOKEN, form, is_running, picture

from opensora_cli.cli.app import main
from opensora_cli.engine.components.weights import packaged_demo


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
    remixed = served.call("POST", f"/v1/videos/{video_id}/remix", {"prompt": "snow", "settings": {"steps": 1}})
    assert remixed["settings"] == {**SMALL, "steps": 1}
    assert (remixed["remixed_from_video_id"], remixed["num_frames"], remixed["prompt"]) == (video_id, 5, "snow")
    served.finished(remixed["id"])
    fields = {"prompt": "snow", "seconds": "0.1", "size": "64x64", "seed": 11}
    remixed = served.call("POST", f"/v1/videos/{remixed['id']}/remix", fields)
    assert (remixed["num_frames"], remixed["size"], remixed["seed"]) == (5, "64x64", 11)
    longer = served.call("POST", f"/v1/videos/{remixed['id']}/remix", {"seconds": "0.7", "seed": 12})
    assert (longer["num_frames"] > 5, longer["size"], longer["seed"]) == (True, "64x64", 12)
    for each in (longer, remixed):
        served.call("DELETE", f"/v1/videos/{each['id']}")
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


@pytest.mark.slow
def test_a_remix_keeps_its_reference_when_the_first_video_is_deleted(served):
    body, kind = form(prompt="a boat", settings=json.dumps(SMALL), input_reference=picture(200, 100))
    first = served.call("POST", "/v1/videos", body, content_type=kind)["id"]
    running = served.make(settings={"steps": 100})
    remixed = served.call("POST", f"/v1/videos/{first}/remix", {"prompt": "a ship"})
    assert remixed["num_references"] == 1
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
        ("POST", "/v1/videos", b'{"prompt": "sea", "settings": {"guidance": 1e999}}', 400, "invalid_json"),
        ("POST", "/v1/videos", b'{"prompt": "sea", "\\ud800": 1}', 400, "invalid_json"),
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


def test_a_plan_is_that_of_a_dry_run_and_counts_references(served):
    plan = served.call("POST", "/v1/plan", {"prompt": "sea", "settings": {"num_frames": 5}})
    assert plan["lines"][0].startswith("Fits: ")
    assert plan["plan"]["schema"].startswith("osora.")
    assert plan["plan"]["jobs"][0]["num_frames"] == 5
    for folder in (served.folder, packaged_demo()):
        assert str(folder) not in json.dumps(plan)
    for kinds, mode in ((["picture", "picture"], "i2v_loop"), (["video"], "v2v_head")):
        plan = served.call("POST", "/v1/plan", {"prompt": "sea", "references": kinds})
        assert any(line.startswith(f"sampling  {mode}, ") for line in plan["lines"])
        assert "stand_in" not in json.dumps(plan)
    for references in (["sound"], "picture", ["picture"] * 9, [[]]):
        status, error = served.error("POST", "/v1/plan", {"prompt": "sea", "references": references})
        assert (status, error["param"]) == (400, "references")


def test_a_failed_video_names_no_folder_of_the_server(served):
    waiting = served.make(settings={"steps": 200})
    failing = served.make_broken()
    served.call("DELETE", f"/v1/videos/{waiting}")
    assert served.finished(failing)["status"] == "failed"
    texts = [served.request("GET", f"/v1/videos/{failing}{end}")[2].decode() for end in ("", "/events")]
    for text in (*texts, served.log.read_text()):
        assert str(served.folder.parent) not in text
    assert "reference 1" in served.call("GET", f"/v1/videos/{failing}")["error"]["message"]


@pytest.mark.slow
def test_a_video_whose_settings_another_version_wrote_fails_with_its_reason(served):
    running = served.make(settings={"steps": 200})
    served.until(running, is_running)
    other, last = served.make(), served.make()
    with closing(sqlite3.connect(served.folder / "jobs.sqlite")) as database, database:
        database.execute("UPDATE jobs SET rest = json_set(rest, '$.settings.video.odd', 1) WHERE id = ?", (other,))
    served.call("DELETE", f"/v1/videos/{running}")
    video = served.finished(other)
    assert (video["status"], video["error"]["code"]) == ("failed", "RequestError")
    assert "video.odd" in video["error"]["message"]
    assert ("another version" in video["hint"], video["exit_code"]) == (True, 2)
    assert served.finished(last)["status"] == "completed"


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


def test_a_running_video_has_previews_steps_and_a_remaining_time(served):
    video_id = served.make(settings={"num_frames": 5, "steps": 30})
    previewed = served.until(video_id, lambda video: video["preview"] and video["stage"].get("eta_s") is not None)
    stage = previewed["stage"]
    assert stage["stage"] in ("denoise", "decode")
    assert 0 <= stage["done"] <= stage["total"]
    assert 0 < previewed["progress"] < 100
    status, headers, content = served.request("GET", f"/v1/videos/{video_id}/preview")
    assert (status, headers["content-type"], content[:4]) == (200, "image/gif", b"GIF8")
    _, _, text = served.request("GET", f"/v1/videos/{video_id}/events")
    events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: ")]
    assert (events[0]["event"], events[-1]["status"]) == ("state", "completed")
    assert {"preview", "progress"} <= {event["event"] for event in events}


def test_metrics_count_jobs(served):
    text = served.request("GET", "/metrics")[2].decode()
    assert 'osora_jobs{status="completed"}' in text
    assert "osora_queue_length 0.0" in text
    assert 'osora_stage_seconds_total{stage="denoise"}' in text


def test_the_page_and_its_parts_are_there(served):
    for path in ("/", "/style.css", "/page.js", "/login", "/openapi.json"):
        status, headers, body = served.request("GET", path)
        assert (status, headers["content-security-policy"] is None, b"http://" in body) == (200, False, False), path


def test_the_server_answers_without_torch_while_a_video_is_made(served):
    video_id = served.make(settings={"steps": 300})
    served.until(video_id, lambda video: video["stage"].get("stage") == "denoise")
    slowest = 0
    for _ in range(20):
        started = time.monotonic()
        assert served.call("GET", f"/v1/videos/{video_id}")["status"] == "in_progress"
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 1
    assert not [each for each in psutil.Process(served.process.pid).memory_maps() if "libtorch" in each.path]
    done = served.call("POST", f"/v1/videos/{video_id}/cancel")["stage"]["done"]
    text = served.request("GET", f"/v1/videos/{video_id}/events")[2].decode()
    states = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert states[-1]["status"] == "cancelled"
    later = [state["progress"]["done"] for state in states if state["event"] == "progress"]
    assert max(later, default=done) < 300  # the rest was not computed


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "give --token-file"),
        (["--token-file", "missing"], 3, "missing"),
        (["--token-file", "short"], 3, "at least 16"),
        (["--groups", "0"], 2, "groups"),
        (["--set", "memory.offlod=blocks"], 2, "memory.offload"),
        (["--set", "parallel.nnodes=2"], 2, "a server has one machine"),
        (["--groups", "2", "--set", "parallel.devices=0,1"], 2, "names the GPUs of one group"),
    ],
)
def test_a_server_with_wrong_settings_does_not_start(options, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("secret")
    assert main(["serve", "--model", "demo", *options]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "serve").exists()


def test_the_extra_is_named_where_it_is_missing(tmp_path):
    code = "import sys\nsys.modules['uvicorn'] = None\nfrom opensora_cli.cli.app import main\nsys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 4
    assert ".[serve]" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_second_server_on_the_folder_is_refused(served):
    words = ["serve", "--model", "demo", "--folder", str(served.folder), "--port", "1024"]
    done = subprocess.run([sys.executable, "-m", "opensora_cli", *words], capture_output=True, text=True)
    assert done.returncode == 3
    assert "has a server already" in done.stderr


def test_a_token_is_needed(guarded):
    assert guarded.error("GET", "/v1/videos")[0] == 401
    assert guarded.call("GET", "/v1/videos", authorization=f"Bearer {TOKEN}")["object"] == "list"
    kind = "application/x-www-form-urlencoded"
    assert guarded.error("POST", "/login", b"token=wrong", content_type=kind)[0] == 401
    assert TOKEN not in guarded.log.read_text()
