"""A language model's server: how it is named and asked, and everything that it may do instead of answering."""

import json
import time
from collections.abc import Iterator

import pytest
from chat_server import KEY, said, serving, with_status
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.generate import chat
from opensora_cli.engine.generate.chat import ChatServer, ServerProblem


@pytest.fixture
def start(monkeypatch, tmp_path) -> Iterator:
    with serving(monkeypatch, tmp_path) as start:
        yield start


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(chat, "sleep", found.append)
    return found


def named(url, *, tries=3, timeout_s=20.0, reporter=None, **changes) -> ChatServer:
    environment = {"OSORA_REFINE_URL": url, "OSORA_REFINE_KEY": KEY, "OSORA_REFINE_MODEL": "small", **changes}
    return ChatServer(environment, timeout_s=timeout_s, tries=tries, reporter=reporter or RecordingReporter())


def ask(stub, *, read=str, pictures=(), **options) -> str:
    return named(stub.url, **options).ask("be brief", "a boat", pictures=pictures, read=read)


def problem(stub, **options) -> str:
    with pytest.raises(ServerProblem) as raised:
        ask(stub, **options)
    assert raised.value.exit_code == 4
    assert KEY not in f"{raised.value.message} {raised.value.hint}"
    return raised.value.message


WRONG_ADDRESSES = ["", "localhost:8000", "ftp://a", "http://", "http://[", "http://a:99999", "http://ü"]
WRONG_ADDRESSES += ["http://me:secret@a", "http://a/v1?key=secret"]


@pytest.mark.parametrize("url", WRONG_ADDRESSES)
def test_a_wrong_address_is_refused(url):
    with pytest.raises(RequestError, match="OSORA_REFINE_URL") as raised:
        named(url)
    assert "export OSORA_REFINE_URL=http" in raised.value.hint
    assert "secret" not in str(raised.value)


def test_the_key_is_never_shown():
    with pytest.raises(RequestError, match="OSORA_REFINE_KEY") as raised:
        named("http://a", OSORA_REFINE_KEY="zzz\nzzz")
    assert "zzz" not in raised.value.message
    assert KEY not in repr(named("https://host/v1/"))


def test_instructions_text_pictures_and_key_are_sent(start):
    stub = start("A boat.", "It sails.")
    assert ask(stub) == "A boat."
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a boat"}]
    assert stub.asked == [{"model": "small", "messages": messages}]
    assert (stub.paths, stub.keys) == (["/v1/chat/completions"], [f"Bearer {KEY}"])
    ask(stub, pictures=[b"one", b"two"])
    text, first, second = stub.asked[1]["messages"][1]["content"]
    assert text == {"type": "text", "text": "a boat"}
    assert first["image_url"]["url"] == "data:image/jpeg;base64,b25l"
    assert second["type"] == "image_url"


def test_without_a_key_none_is_sent_and_the_first_model_is_asked(start):
    stub = start("A boat.")
    ask(stub, OSORA_REFINE_KEY="", OSORA_REFINE_MODEL="")
    assert stub.paths == ["/v1/models", "/v1/chat/completions"]
    assert (stub.keys, stub.asked[0]["model"]) == ([None, None], "listed-model")


def test_busy_servers_are_asked_again_later_and_later(start, waits):
    reporter = RecordingReporter()
    assert ask(start(503, 500, "A boat."), reporter=reporter) == "A boat."
    assert waits == [1.0, 2.0]
    assert "503 Service Unavailable; try 2 of 3 in 1 s" in reporter.notes[0]
    assert "500 Internal Server Error" in problem(start(503, 500), tries=2)


@pytest.mark.parametrize(
    ("asked", "waited"), [("7", 7.0), ("100000", 30.0), ("9" * 60, 30.0), ("soon", 1.0), ("-3", 1.0), ("nan", 1.0)]
)
def test_they_may_say_when_within_bounds(start, waits, asked, waited):
    ask(start(with_status(429, Retry_After=asked), "A boat."))
    assert waits == [waited]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_refusals_are_final(start, waits, status):
    body = json.dumps({"error": {"message": f"no model\nof this name for {KEY}"}}).encode()
    stub = start(with_status(status, body))
    assert f"{status} " in (message := problem(stub))
    assert message.endswith("no model of this name for <hidden>")
    assert (len(stub.asked), waits) == (1, [])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirections_are_not_followed(start, waits, status):
    elsewhere = start("here I am")
    stub = start(with_status(status, Location=f"{elsewhere.url}/chat/completions"))
    assert f"it redirects to {elsewhere.url}/chat/completions, which is not" in problem(stub)
    assert (elsewhere.paths, len(stub.paths)) == ([], 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>", "no JSON"),
        (b"\xff\xfe", "no UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b"{}", "an answer of another form"),
        (b'{"choices": []}', "an answer of another form"),
        (b'{"choices": [{"message": null}]}', "an answer of another form"),
        (said(None), "an answer without text"),
        (said("half \ud83d"), "has half a character"),
        (with_status(200, b"{", Content_Length="100"), "no JSON"),
        (lambda handler: handler.wfile.write(b"what\r\n\r\n"), "what"),
        (lambda handler: handler.connection.close(), ""),
    ],
)
def test_nonsense_is_asked_again(start, waits, answer, words):
    assert ask(start(answer, "A boat.")) == "A boat."
    assert words in problem(start(answer), tries=1)


def test_an_answer_that_its_reader_refuses_is_asked_again(start, waits):
    assert ask(start("much", "7"), read=lambda text: str(int(text))) == "7"


def test_a_large_answer_is_cut_off(start):
    sent = []

    def endless(handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" " * 2**20)
            sent.append(2**20)

    assert "an answer of over 10,000,000 bytes" in problem(start(endless), tries=1)
    assert sum(sent) < 50 * 2**20


@pytest.mark.parametrize("begun", [False, True])
def test_a_server_that_hangs_is_given_up(start, begun):
    def drip(handler) -> None:
        if begun:
            handler.send_response(200)
            handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" " if begun else b"")
            handler.wfile.flush()
            time.sleep(0.05)

    assert "no answer in 0.2 s" in problem(start(drip), tries=1, timeout_s=0.2)


def test_a_server_that_does_not_run_is_an_error(start, waits):
    stub = start()
    stub.close()
    assert "Connection refused" in problem(stub, tries=2)
    assert waits == [1.0]
