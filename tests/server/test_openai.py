"""The client `openai` and `osora serve`."""

import io

import pytest
from PIL import Image
from served import SMALL, Served

openai = pytest.importorskip("openai", reason="needs openai")
# The company behind the client ended its own service.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TOKEN = "a-secret-of-letters"
OURS = {"settings": SMALL}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    (folder / "token").write_text(TOKEN)
    with Served(folder / "serve", "--token-file", str(folder / "token"), "--max-queue", "3") as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=TOKEN, max_retries=0)


@pytest.fixture(scope="module")
def video(client):
    return client.videos.create_and_poll(prompt="raining, sea", size="96x128", poll_interval_ms=100, extra_body=OURS)


def made(client, **values):
    video = client.videos.create_and_poll(poll_interval_ms=100, **values)
    assert (video.status, video.error) == ("completed", None)
    return video


def test_a_video_is_created_and_retrieved(client, video):
    assert (video.object, video.status, video.progress, video.size) == ("video", "completed", 100, "96x128")
    assert isinstance(video.seconds, str)
    assert video.created_at <= video.completed_at
    assert client.videos.retrieve(video.id) == video


def test_seconds_choose_the_number_of_frames(client):
    video = made(client, prompt="sea", seconds="0.5", extra_body={"settings": {"steps": 1}})
    assert float(video.seconds) == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize(("variant", "kind"), [("video", "mp4"), ("thumbnail", "WEBP"), ("spritesheet", "JPEG")])
def test_each_variant_is_downloaded(client, video, variant, kind):
    content = client.videos.download_content(video.id, variant=variant).read()
    if kind == "mp4":
        assert content[4:8] == b"ftyp"
    else:
        assert Image.open(io.BytesIO(content)).format == kind


def test_a_reference_is_uploaded(client):
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    video = made(client, prompt="a boat", input_reference=("boat.png", file.getvalue()), extra_body=OURS)
    assert video.model_extra["num_references"] == 1
    assert video.model_extra["num_frames"] == SMALL["num_frames"]


def test_a_remix_has_the_settings_and_another_prompt(client, video):
    remix = client.videos.poll(client.videos.remix(video.id, prompt="snow, sea").id, poll_interval_ms=100)
    assert (remix.status, remix.prompt, remix.remixed_from_video_id) == ("completed", "snow, sea", video.id)
    assert (remix.size, remix.seconds, remix.model_extra["seed"]) == (
        video.size,
        video.seconds,
        video.model_extra["seed"],
    )


@pytest.mark.slow
def test_lists_are_paged_and_deleted_videos_leave_them(client):
    ids = [made(client, prompt=f"sea {number}", extra_body=OURS).id for number in range(3)]
    assert [video.id for video in client.videos.list(limit=2)][:3] == ids[::-1]  # follows pages
    assert [video.id for video in client.videos.list(limit=2).data] == ids[:0:-1]
    assert [video.id for video in client.videos.list(order="asc", after=ids[0]).data] == ids[1:]
    deleted = client.videos.delete(ids[1])
    assert (deleted.id, deleted.deleted, deleted.object) == (ids[1], True, "video.deleted")
    assert ids[1] not in {video.id for video in client.videos.list()}


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["demo"]


def error_of(call):
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    error = caught.value
    assert error.message
    return type(error), error.body["code"], error.body["param"], error.body["type"]


def test_each_error_has_its_class(client):
    invalid = "invalid_request_error"
    missing = (openai.NotFoundError, "not_found", "video_id", invalid)
    videos = client.videos
    for call in (videos.retrieve, videos.delete, videos.download_content):
        assert error_of(lambda call=call: call("video_0")) == missing
    assert error_of(lambda: videos.remix("video_0", prompt="sea")) == missing
    for values, param in (({"prompt": ""}, "prompt"), ({"size": "1x"}, "size"), ({"seconds": "99"}, "seconds")):
        assert error_of(lambda values=values: videos.create(**{"prompt": "sea", **values})) == (
            openai.BadRequestError,
            "invalid_field",
            param,
            invalid,
        )
    error = error_of(lambda: videos.create(prompt="sea", extra_body={"settings": {"step": 2}}))
    assert error[:2] == (openai.BadRequestError, "request_error")
    assert error_of(lambda: videos.create(prompt="sea", input_reference=b"no picture"))[1] == "media_error"
    wrong = client.with_options(api_key="another-secret")
    assert error_of(lambda: wrong.videos.list())[:2] == (openai.AuthenticationError, "invalid_token")


@pytest.mark.slow
def test_running_and_refused_videos_have_their_errors(client, served):
    videos = client.videos
    running = videos.create(prompt="sea", extra_body={"settings": {"steps": 200}}).id
    while videos.retrieve(running).status == "queued":
        pass
    assert error_of(lambda: videos.download_content(running))[:2] == (openai.ConflictError, "not_completed")
    waiting = [videos.create(prompt="sea", extra_body=OURS).id for _ in range(3)]
    full = error_of(lambda: videos.create(prompt="sea", extra_body=OURS))
    assert full == (openai.RateLimitError, "queue_full", None, "invalid_request_error")
    served.call("POST", f"/v1/videos/{running}/cancel", authorization=f"Bearer {TOKEN}")
    assert videos.poll(running, poll_interval_ms=50).status == "cancelled"
    for each in waiting:
        assert videos.poll(each, poll_interval_ms=50).status == "completed"
