"""The client `openai` and `osora serve`. `test_server.py` has the same facts without the client."""

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
