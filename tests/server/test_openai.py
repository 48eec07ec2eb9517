"""The client `openai` and `osora serve`. `test_server.py` has the same facts without the client."""

import pytest
from served import SMALL, TOKEN, picture


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the company behind the client ended its own service
def test_a_video_is_created_downloaded_and_made_again(guarded):
    openai = pytest.importorskip("openai", reason="needs openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key=TOKEN, max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    video = client.videos.create_and_poll(
        prompt="raining, sea",
        size="96x128",
        input_reference=("boat.png", picture(64, 64)),
        extra_body={"settings": SMALL},
        poll_interval_ms=100,
    )
    assert (video.object, video.status, video.progress, video.error) == ("video", "completed", 100, None)
    assert (video.size, video.model_extra["num_references"]) == ("96x128", 1)
    assert isinstance(video.seconds, str)
    assert video.created_at <= video.completed_at
    assert client.videos.retrieve(video.id) == video
    assert client.videos.download_content(video.id, variant="video").read()[4:8] == b"ftyp"
    remix = client.videos.poll(client.videos.remix(video.id, prompt="snow, sea").id, poll_interval_ms=100)
    assert (remix.status, remix.prompt, remix.remixed_from_video_id) == ("completed", "snow, sea", video.id)
    assert (remix.size, remix.seconds) == (video.size, video.seconds)
    assert remix.model_extra["seed"] == video.model_extra["seed"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt="sea", size="1x")
    assert (caught.value.body["code"], caught.value.body["param"]) == ("invalid_field", "size")
