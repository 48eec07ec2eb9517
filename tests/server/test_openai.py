"""The client `openai` and `osora serve`. `test_server.py` has the same facts without the client."""

import io

import pytest
from served import SMALL, TOKEN, picture

# The company behind the client ended its own service.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
OURS = {"settings": SMALL}


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai", reason="needs openai")


@pytest.fixture(scope="module")
def client(openai, guarded):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key=TOKEN, max_retries=0)


def made(client, **values):
    video = client.videos.create_and_poll(**{"prompt": "raining, sea", "poll_interval_ms": 100, **values})
    assert (video.object, video.status, video.progress, video.error) == ("video", "completed", 100, None)
    return video


def test_a_video_is_created_downloaded_and_made_again(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    reference = ("boat.png", picture(64, 64))
    video = made(client, size="96x128", input_reference=reference, extra_body=OURS)
    assert (video.size, video.model_extra["num_references"]) == ("96x128", 1)
    assert isinstance(video.seconds, str)
    assert video.created_at <= video.completed_at
    assert client.videos.retrieve(video.id) == video
    assert client.videos.download_content(video.id, variant="video").read()[4:8] == b"ftyp"
    remix = client.videos.poll(client.videos.remix(video.id, prompt="snow, sea").id, poll_interval_ms=100)
    assert (remix.status, remix.prompt, remix.remixed_from_video_id) == ("completed", "snow, sea", video.id)
    assert (remix.size, remix.seconds) == (video.size, video.seconds)
    assert remix.model_extra["seed"] == video.model_extra["seed"]
    half = made(client, seconds="0.5", extra_body={"settings": {"steps": 1}})
    assert float(half.seconds) == pytest.approx(0.5, abs=0.2)


def test_lists_are_paged_and_deleted_videos_leave_them(client):
    ids = [made(client, extra_body=OURS).id for _ in range(3)]
    assert [video.id for video in client.videos.list(limit=2)][:3] == ids[::-1]  # follows pages
    assert [video.id for video in client.videos.list(order="asc", after=ids[0]).data] == ids[1:]
    deleted = client.videos.delete(ids[1])
    assert (deleted.id, deleted.deleted, deleted.object) == (ids[1], True, "video.deleted")
    assert ids[1] not in {video.id for video in client.videos.list()}


def test_each_error_has_its_class(openai, client, guarded):
    def error_of(call, *args, **values):
        with pytest.raises(openai.APIStatusError) as caught:
            call(*args, **values)
        error = caught.value
        assert error.message
        assert error.body["type"] == ("authentication_error" if error.status_code == 401 else "invalid_request_error")
        return type(error), error.body["code"], error.body["param"]

    videos, missing = client.videos, (openai.NotFoundError, "not_found", "video_id")
    for call in (videos.retrieve, videos.delete, videos.download_content):
        assert error_of(call, "video_0") == missing
    assert error_of(videos.remix, "video_0", prompt="sea") == missing
    for values, param in (({"prompt": ""}, "prompt"), ({"size": "1x"}, "size"), ({"seconds": "99"}, "seconds")):
        expected = openai.BadRequestError, "invalid_field", param
        assert error_of(videos.create, **{"prompt": "sea", **values}) == expected
    assert error_of(videos.create, prompt="sea", extra_body={"settings": {"step": 2}})[1] == "request_error"
    assert error_of(videos.create, prompt="sea", input_reference=io.BytesIO(b"no picture"))[1] == "media_error"
    wrong = client.with_options(api_key="another-secret")
    assert error_of(wrong.videos.list)[:2] == (openai.AuthenticationError, "invalid_token")
    running = videos.create(prompt="sea", extra_body={"settings": {"steps": 200}}).id
    while videos.retrieve(running).status == "queued":
        pass
    assert error_of(videos.download_content, running)[:2] == (openai.ConflictError, "not_completed")
    for _ in range(3):
        videos.create(prompt="sea", extra_body=OURS)
    assert error_of(videos.create, prompt="sea", extra_body=OURS) == (openai.RateLimitError, "queue_full", None)
    guarded.call("POST", f"/v1/videos/{running}/cancel", authorization=f"Bearer {TOKEN}")
    assert videos.poll(running, poll_interval_ms=50).status == "cancelled"
