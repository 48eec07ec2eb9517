import asyncio

import pytest

from opensora_cli.server.requests import ApiError
from opensora_cli.server.run import Guard
from opensora_cli.settings.tools import LOOPBACK

TOKEN = "a-token-of-letters"


async def app(scope, receive, send):
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def answer(guard, *, path="/v1/videos", bodies=(b"",), **headers):
    sent = []
    left = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
    left[-1]["more_body"] = False

    async def receive():
        return left.pop(0)

    async def send(message):
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(guard({"type": "http", "path": path, "headers": pairs}, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, 403),  # DNS rebinding
        ({"host": "localhost:8000", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "localhost:8000", "origin": "http://[evil"}, 403),
        ({}, 403),
    ],
)
def test_other_names_and_other_pages_are_refused(headers, status):
    guard = Guard(app, hosts=LOOPBACK, token=None, largest_body=10)
    found, sent = answer(guard, **headers)
    assert found == status
    assert b"default-src 'none'" in sent[b"content-security-policy"]


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, "/v1/videos", 200),
        ({"cookie": f"osora_token={TOKEN}"}, "/v1/videos", 200),
        ({}, "/v1/videos", 401),
        ({"authorization": f"Bearer {TOKEN}x"}, "/v1/videos", 401),
        ({"cookie": "osora_token=; \x80"}, "/v1/videos", 401),
        ({}, "/", 401),
        ({}, "/login", 200),
        ({}, "/healthz", 200),
    ],
)
def test_a_token_is_asked_for(headers, path, status):
    guard = Guard(app, hosts=(), token=TOKEN, largest_body=10)
    assert answer(guard, path=path, host="example.org", **headers)[0] == status


def test_long_bodies_are_refused_with_and_without_a_length():
    guard = Guard(app, hosts=(), token=None, largest_body=10)
    assert answer(guard, content_length="10")[0] == 200
    assert answer(guard, content_length="11")[0] == 413
    assert answer(guard, content_length="-1")[0] == 413
    assert answer(guard, bodies=(b"12345", b"67890"))[0] == 200
    with pytest.raises(ApiError) as caught:
        answer(guard, bodies=(b"12345", b"678901", b"2"))
    assert (caught.value.status, caught.value.headers) == (413, {"Connection": "close"})


def test_a_request_without_a_token_is_small():
    guard = Guard(app, hosts=(), token=TOKEN, largest_body=2**20)
    assert answer(guard, path="/login", content_length="16384")[0] == 200
    assert answer(guard, path="/login", content_length="16385")[0] == 413
    with pytest.raises(ApiError, match="16384 bytes"):
        answer(guard, path="/login", bodies=(bytes(9000), bytes(9000)))


def test_a_body_that_stops_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("opensora_cli.server.run.PATIENCE_S", 0.01)

    async def hung():
        await asyncio.sleep(60)

    async def send(message):
        pass

    guard = Guard(app, hosts=(), token=None, largest_body=10)
    with pytest.raises(ApiError) as caught:
        asyncio.run(guard({"type": "http", "path": "/v1/videos", "headers": []}, hung, send))
    assert caught.value.status == 408
