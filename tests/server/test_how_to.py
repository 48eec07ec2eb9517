"""What docs/how_to/serve.md and examples/serve show, against a server."""

import json
import re
import shlex
import shutil
import signal
import subprocess
from http.client import HTTPConnection
from pathlib import Path

import pytest
from served import TOKEN, Served, picture

from opensora_cli.cli.app import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how_to/serve.md").read_text()
EXAMPLES = ROOT / "examples/serve"
DOCKERFILE = EXAMPLES / "Dockerfile"


def block(start):
    (found,) = re.findall(rf"```\w+\n({re.escape(start)}.*?)```", PAGE, re.DOTALL)
    return found


def is_command(words, capsys):
    code = main([*words[1:], "--help"])
    return code == 0 and "Usage" in capsys.readouterr().out


@pytest.mark.slow
def test_the_client_of_the_page_makes_a_video(guarded, tmp_path, monkeypatch):
    pytest.importorskip("openai", reason="needs openai")
    code = block("from openai")
    for shown, own in (
        ("127.0.0.1:8000", f"127.0.0.1:{guarded.port}"),
        ("unused without a token", TOKEN),
        ('"steps": 20', '"steps": 1'),
    ):
        assert shown in code
        code = code.replace(shown, own)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "sea.mp4").read_bytes()[4:8] == b"ftyp"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_each_line_of_curl_is_answered(guarded, tmp_path):
    (tmp_path / "boat.png").write_bytes(picture(64, 64))
    bearer = {"authorization": f"Bearer {TOKEN}"}
    video_id = guarded.call("POST", "/v1/videos", {"prompt": "sea", "settings": {"steps": 1}}, **bearer)["id"]
    lines = (
        block("curl").replace("127.0.0.1:8000", f"127.0.0.1:{guarded.port}").replace("VIDEO_ID", video_id).splitlines()
    )
    assert len(lines) == 5
    for line in lines:  # the events end with the video
        words = [*shlex.split(line), "--silent", "--fail", "-H", f"Authorization: Bearer {TOKEN}"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True, timeout=120)
        if "/events" in line:
            assert b'"status": "completed"' in done.stdout
        elif "-o" not in words:
            assert json.loads(done.stdout)["object"] == "video"
    assert (tmp_path / "sea.mp4").read_bytes()[4:8] == b"ftyp"


@pytest.mark.slow
def test_a_page_behind_nginx_is_served(guarded):
    assert "examples/serve/nginx.conf" in PAGE
    config = (EXAMPLES / "nginx.conf").read_text().partition("\n")[2]
    assert config.count("{") == config.count("}")
    assert all(line.strip()[-1] in ";{}" for line in config.splitlines())
    assert int(re.search(r"client_max_body_size (\d+)m;", config)[1]) == 512
    values = {"$http_host": "videos.example.org", "$scheme": "https"}
    headers = {name: values[value] for name, value in re.findall(r"proxy_set_header (\S+) (\S+);", config)}
    assert headers.keys() == {"Host", "X-Forwarded-Proto"}
    headers["origin"] = "https://videos.example.org"
    login = {**headers, "content-type": "application/x-www-form-urlencoded"}
    connection = HTTPConnection("127.0.0.1", guarded.port)
    connection.request("POST", "/login", f"token={TOKEN}", login)
    answer = connection.getresponse()
    answer.read()
    cookie = answer.headers["set-cookie"]
    assert answer.status == 303
    assert {"HttpOnly", "Secure", "SameSite=strict"} <= set(cookie.split("; "))
    connection.request("POST", "/v1/plan", b'{"prompt": "sea"}', {**headers, "cookie": cookie.split(";")[0]})
    assert connection.getresponse().status == 200
    connection.close()


def test_the_unit_of_systemd_is_valid(tmp_path, capsys):
    assert "examples/serve/osora.service" in PAGE
    unit = (EXAMPLES / "osora.service").read_text()
    command = shlex.split(re.search(r"ExecStart=(.*)", unit)[1])
    assert is_command(command, capsys)
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze")
    file = tmp_path / "osora.service"
    file.write_text(unit.replace(command[0], "/bin/true"))
    done = subprocess.run([analyze, "verify", "--recursive-errors=no", str(file)], capture_output=True, text=True)
    assert "osora.service" not in done.stderr


@pytest.mark.slow
def test_sigterm_ends_the_server_in_time(tmp_path):
    with Served(tmp_path / "serve", save_every=1000) as served:
        video_id = served.make(settings={"steps": 300})
        served.until(video_id, lambda video: video["stage"].get("stage") == "denoise" and video["stage"]["done"] > 2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) in (0, -signal.SIGTERM)
        assert list((served.folder / "jobs" / video_id).glob("*.safetensors"))
        assert served.log.read_text().count("\n") == 1  # the address


def test_the_dockerfile_is_valid(capsys):
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    found = dict(lines)
    assert found["USER"] not in ("root", "0")
    for part in found["RUN"].split("&&"):
        subprocess.run(["bash", "-n", "-c", part], check=True)
    assert (ROOT / re.search(r"--constraint (\S+)", found["RUN"])[1]).is_file()
    command = json.loads(found["CMD"])
    assert is_command(command, capsys)
    assert command[command.index("--folder") + 1] == found["VOLUME"]
    check = json.loads(found["HEALTHCHECK"].removeprefix("CMD "))
    compile(check[2], "HEALTHCHECK", "exec")
    assert f":{found['EXPOSE']}/healthz" in check[2]
    assert str(DOCKERFILE.relative_to(ROOT)) in PAGE
    secret = command[command.index("--token-file") + 1]
    assert f":{secret}:ro" in PAGE
