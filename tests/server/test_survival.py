"""Ends of processes, and conditions of the machine, that a server must survive."""

import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from served import Served, is_running


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_video_is_the_same_after_any_process_was_killed(tmp_path):
    settings = {"num_frames": 5, "steps": 12}
    with Served(tmp_path / "serve") as served:
        whole = served.make(settings=settings)
        assert served.finished(whole)["status"] == "completed"
        for number, killed in enumerate(("worker", "server", "both", "term") * 5):
            video_id = served.make(settings=settings)
            stage = ("starting", "text", "denoise", "denoise", "decode")[number // 4]
            least = number % 4 * 3 + number // 12 if stage == "denoise" else 0
            served.until(
                video_id,
                lambda video, stage=stage, least=least: (
                    stage == "starting"
                    or (video["stage"].get("stage") == stage and video["stage"]["done"] >= least)
                    or video["stage"].get("stage") == "decode"
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


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_fails_the_job_with_its_reason_and_the_others_go_on(small_disk):
    with Served(small_disk / "serve", save_every=1000) as served:
        done = served.make()
        assert served.finished(done)["status"] == "completed"
        failing = served.make(settings={"steps": 100, "num_frames": 5})
        served.until(failing, is_running)
        waiting = served.make()
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        status, error = served.error("POST", "/v1/videos", {"prompt": "sea"})
        assert (status, error["code"], error["type"]) == (507, "disk_full", "server_error")
        video = served.finished(failing)
        assert video["status"] == "failed"
        assert "No space left" in video["error"]["message"]
        assert served.request("GET", f"/v1/videos/{done}/content")[0] == 200
        assert served.call("GET", f"/v1/videos/{waiting}")["place"] == 1
        ballast.unlink()
        assert served.finished(waiting)["status"] == "completed"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_jobs_leave_the_memory_flat(tmp_path):
    with Served(tmp_path / "serve", "--max-queue", "1000") as served:
        settings = {"num_frames": 1, "steps": 1, "width": 64, "height": 64}
        served.finished(served.make(settings=settings))
        ids = [served.make(settings=settings) for _ in range(999)]
        process = psutil.Process(served.process.pid)
        served.finished(ids[50])
        memory = process.memory_info().rss
        limit = time.monotonic() + 1500
        while served.call("GET", f"/v1/videos/{ids[-1]}")["status"] != "completed":
            assert time.monotonic() < limit, served.call("GET", f"/v1/videos/{ids[-1]}")
            time.sleep(1)
        assert process.memory_info().rss < memory + 16 * 2**20
        assert 'osora_jobs{status="completed"} 1000.0' in served.request("GET", "/metrics")[2].decode()
