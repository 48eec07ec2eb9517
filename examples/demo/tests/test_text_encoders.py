"""The demo's text encoders: their tokenizer, and what they are asked."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from closeness import assert_close

from demo_world.captions import known_words
from demo_world.scenes import Colour, Direction, Place, Scene, Shape, Speed, Thing, Time, Weather
from demo_world.settings import TextEncoderSettings, TextRecipe
from demo_world.text_encoders import (
    Reading,
    TextTask,
    answers,
    build_vocabulary,
    sample_captions,
)
from demo_world.training import train_text_encoders
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.batches import SampleRng, Stream
from opensora_cli.engine.components.architectures import load_clip, load_t5

WIDTH, LENGTH = 16, 12
SIZES = TextEncoderSettings(
    batch_size=2,
    t5_width=WIDTH,
    t5_layers=1,
    t5_heads=2,
    t5_max_length=LENGTH,
    clip_width=WIDTH,
    clip_layers=1,
    clip_heads=2,
    clip_max_length=LENGTH,
)
THING = Thing(Shape.BOAT, Colour.BLUE, Direction.RIGHT, Speed.FAST)
SCENE = Scene(Place.FOREST, Weather.SNOW, Time.SUNSET, THING, seed=0)


class TestAnswers:
    def test_of_a_thing(self):
        assert answers(SCENE) == [2, 2, 1, 1, 3, 1, 1]

    def test_of_an_empty_place(self):
        assert answers(dataclasses.replace(SCENE, thing=None)) == [2, 2, 1, 4, 4, 2, 2]


class TestTokenizer:
    def test_words_and_marks(self):
        vocabulary = build_vocabulary(start=False)
        assert vocabulary.encode("Raining, SEA.").tokens == ["raining", ",", "sea", ".", "</s>"]
        assert vocabulary.encode("a zebra on the sea").tokens == ["a", "<unk>", "on", "the", "sea", "</s>"]
        assert all(vocabulary.encode(word).tokens == [word, "</s>"] for word in known_words())

    @pytest.mark.parametrize("start", [False, True])
    def test_ends_pads_and_cuts(self, start):
        vocabulary = build_vocabulary(start=start)
        reading = Reading(vocabulary, 6)
        begin = ["<s>"] if start else []

        def tokens(text):
            return [vocabulary.id_to_token(each) for each in reading.ids([text])[0].tolist()]

        assert tokens("sea") == [*begin, "sea", "</s>"] + ["<pad>"] * (4 - start)
        assert tokens("sea " * 9) == [*begin, *["sea"] * (5 - start), "</s>"]
        assert tokens("")[: 1 + start] == [*begin, "</s>"]


class TestTask:
    def test_learns_to_answer(self):
        torch.manual_seed(0)
        task = TextTask(SIZES)
        optimizer = torch.optim.AdamW(task.module.parameters(), lr=1e-2)
        right = []
        for step in range(30):
            batch = sample_captions(SampleRng.of(0, step, Stream.DATA), step, batch_size=32)
            loss, figures = task.loss(batch, SampleRng.of(0, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right.append((figures["t5_right"], figures["clip_right"]))
        first, last = np.mean(right[:3], axis=0), np.mean(right[-3:], axis=0)
        assert np.all(last > first + 0.1)
        assert np.all(last <= 1.0)

    def test_a_batch_is_of_its_number_alone(self):
        one, same, other = (
            sample_captions(SampleRng.of(0, number, Stream.DATA), number, batch_size=3) for number in (5, 5, 6)
        )
        assert one.captions == same.captions != other.captions
        assert torch.equal(one.answers_BQ, same.answers_BQ)
        task = TextTask(SIZES)
        assert (task.tokens(one), one.paths) == (3 * 24, one.captions)


def recipe(folder):
    return TextRecipe.model_validate(
        {
            "output": str(folder),
            "text_encoders": SIZES,
            "loop": {"steps": 4, "log_every": 2},
            "optimizer": {"warmup_steps": 1},
        }
    )


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    train_text_encoders(recipe(folder), reporter=SilentReporter())
    return folder


class TestRun:
    def test_the_export_is_read_back(self, text_folder):
        length = {"max_length": LENGTH, "device": torch.device("cpu"), "dtype": torch.float32}
        t5 = load_t5(text_folder / "t5", **length)
        clip = load_clip(text_folder / "clip", **length)
        prompts = ["raining, sea", "a red boat"]
        assert t5.encode(prompts).shape == (2, LENGTH, WIDTH)
        assert clip.encode(prompts).shape == (2, WIDTH)
        for encoder in (t5, clip):
            assert encoder.unknown_words("a zebra on the sea") == ["zebra"]
            assert not torch.equal(*encoder.encode(prompts))
        assert "sea" in json.loads((text_folder / "vocabulary.json").read_text())["places"]

    def test_the_export_is_read_by_transformers(self, text_folder):
        options = {"max_length": LENGTH, "device": torch.device("cpu"), "dtype": torch.float32}
        prompts = ["raining, sea", "a red zebra " * 20]
        padded = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        for name, load, model_class, output in (
            ("t5", load_t5, transformers.T5EncoderModel, "last_hidden_state"),
            ("clip", load_clip, transformers.CLIPTextModel, "pooler_output"),
        ):
            model = model_class.from_pretrained(text_folder / name)
            ids = transformers.AutoTokenizer.from_pretrained(text_folder / name)(prompts, **padded).input_ids
            with torch.no_grad():
                assert_close(load(text_folder / name, **options).encode(prompts), model(ids)[output])

    def test_an_earlier_run_is_kept_or_replaced_by_the_same(self, text_folder):
        with pytest.raises(OutputError, match="holds an earlier run"):
            train_text_encoders(recipe(text_folder), reporter=SilentReporter())
        before = (text_folder / "t5" / "model.safetensors").read_bytes()
        train_text_encoders(recipe(text_folder), overwrite=True, reporter=SilentReporter())
        assert (text_folder / "t5" / "model.safetensors").read_bytes() == before
        lines = [json.loads(line) for line in (text_folder / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [2, 4]
