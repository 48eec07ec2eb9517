"""Names of sampling, called as the community calls them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chat_server import KEY, serving
from closeness import assert_close
from tiny_autoencoders import VAES
from tiny_clips import write_clip

from opensora_cli.community.sampling import (
    add_fps_info_to_text,
    add_motion_score_to_text,
    collect_references_batch,
    get_save_path_name,
    process_and_save,
    read_from_path,
    refine_prompts,
    rescale_image_by_path,
    save_sample,
)
from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.media.read import probe


class Config(dict):
    """Attributes and `get`, as mmengine's configurations have both."""

    __getattr__ = dict.__getitem__


def config(folder: Path, **others: object) -> Config:
    return Config(save_dir=str(folder), dataset=SimpleNamespace(data_path="tables/assets.csv"), **others)


def test_references_are_encoded_for_each_sample(tmp_path):
    torch.manual_seed(0)
    model_ae = new_autoencoder(VAES["hunyuan"]).eval()
    for name in "ab":
        save_sample(torch.rand(3, 1, 32, 48) * 2 - 1, save_path=tmp_path / name)
    one, both = f"{tmp_path}/a.png", f"{tmp_path}/a.png;{tmp_path}/b.png"
    with torch.no_grad():
        none, head, loop = (
            collect_references_batch([paths], mode, model_ae, (32, 32), is_causal=True)[0]
            for paths, mode in (("", "i2v_head"), (one, "i2v_head"), (both, "i2v_loop"))
        )
        expected = model_ae.encode(read_from_path(one, (32, 32))[None])[0]
    assert none is None
    assert (len(head), len(loop)) == (1, 2)
    assert_close(head[0], expected)
    assert not torch.equal(loop[1], expected)


def test_results_are_saved_under_their_names(tmp_path):
    batch = {"text": ["a boat", "a car"], "name": ["boat", "car"], "index": torch.tensor([0, 1])}
    x = torch.zeros(2, 3, 5, 16, 16)
    arguments = (x, batch, config(tmp_path, save_prefix="my_", fps_save=8), "video_256px", object(), 0, 4)
    assert process_and_save(*arguments, saving=False) == ["my_boat", "my_car"]
    assert list(tmp_path.iterdir()) == []
    assert process_and_save(*arguments) == ["my_boat", "my_car"]
    folder = tmp_path / "video_256px"
    assert sorted(path.name for path in folder.iterdir()) == ["my_boat.mp4", "my_boat.txt", "my_car.mp4", "my_car.txt"]
    assert (folder / "my_car.txt").read_text() == "a car"
    facts = probe(folder / "my_boat.mp4")
    assert (facts.num_frames, facts.height, facts.width, facts.fps) == (5, 16, 16, 8)


def test_without_names_results_have_that_of_their_table(tmp_path):
    x, batch = torch.zeros(2, 3, 1, 16, 16, dtype=torch.bfloat16), {"text": ["a", "b"], "index": [0, 1]}
    assert process_and_save(x, batch, config(tmp_path), "", None, 2, 7) == ["assets_0007_2", "assets_0008_2"]
    assert (tmp_path / "assets_0008_2.png").is_file()
    prompts = process_and_save(x, batch, config(tmp_path, prompt_as_path=True), "", None, 1, 0, saving=False)
    assert prompts == ["a-1", "b-1"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"name": "boat", "num_sample_pos": 0}, "boat"),
        ({"name": "boat", "num_sample_pos": 3, "save_prefix": "p_"}, "p_boat_3"),
        ({"fallback_name": "t", "index": 12}, "t_0012"),
        ({"prompt_as_path": True, "prompt": "Rain: a/b?", "num_sample_pos": 0}, "rain-a-b-0"),
    ],
)
def test_paths_of_results(arguments, name):
    assert get_save_path_name("out", "sub", **arguments) == str(Path("out", "sub", name))


def test_a_name_never_leaves_the_folder():
    with pytest.raises(RequestError, match="is no name of a file"):
        get_save_path_name("out", "", name="../../boat")
    assert "/" not in get_save_path_name("out", "", prompt_as_path=True, prompt="../" * 90).removeprefix("out/")


def test_a_picture_is_rescaled_where_it_is(tmp_path):
    path = save_sample(torch.zeros(3, 1, 20, 60), save_path=tmp_path / "a")
    rescale_image_by_path(path, 32, 16)
    assert (probe(path).width, probe(path).height) == (32, 16)
    with pytest.raises(RequestError, match="must be a PNG"):
        rescale_image_by_path("a.jpg", 32, 16)


def test_files_are_read_at_a_size(tmp_path):
    write_clip(tmp_path / "a.mp4", num_frames=5, fps=12, caption="a")
    video = read_from_path(tmp_path / "a.mp4", (16, 16))
    assert (video.shape, video.dtype) == ((3, 5, 16, 16), torch.float32)
    picture = save_sample(torch.ones(3, 1, 20, 40), save_path=tmp_path / "b")
    assert_close(read_from_path(picture, (8, 8), transform_name="resize_crop"), torch.ones(3, 1, 8, 8))
    with pytest.raises(RequestError, match="rand_size_crop"):
        read_from_path(picture, (8, 8), transform_name="rand_size_crop")


@pytest.fixture(name="serving")
def start_servers(monkeypatch, tmp_path):
    monkeypatch.setattr("opensora_cli.engine.generate.refinement.sleep", lambda _: None)
    with serving(monkeypatch, tmp_path / "cache") as start:
        yield start


class TestPrompts:
    def test_rates_and_scores_follow_the_prompt(self):
        assert add_fps_info_to_text(["a boat"], fps=24) == ["a boat. 24 FPS."]
        for score in (4, "4"):
            assert add_motion_score_to_text(text=["a boat."], motion_score=score) == ["a boat. 4 motion score."]
        with pytest.raises(RequestError, match="'fast' must be a number or dynamic"):
            add_motion_score_to_text(["a boat."], "fast")

    def test_a_dynamic_score_is_asked_for(self, serving):
        server = serving("7", "much", "16", "2")
        assert add_motion_score_to_text(["a.", "b."], "dynamic") == ["a. 7 motion score.", "b. 2 motion score."]
        assert len(server.asked) == 4

    @pytest.mark.parametrize("kind", ["t2v", "t2i"])
    def test_prompts_are_refined_one_by_one(self, serving, kind):
        server = serving("A boat on the sea.", " A car. ")
        assert refine_prompts(["boat", "car"], retry_times=1, type=kind) == ["A boat on the sea.", "A car."]
        assert [asked["messages"][1]["content"] for asked in server.asked] == ["boat", "car"]
        assert {asked["model"] for asked in server.asked} == {"small"}
        assert server.keys == [f"Bearer {KEY}"] * 2
