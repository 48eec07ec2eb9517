"""The demo's text encoders: their tokenizer, and what they are asked."""

import dataclasses

import numpy as np
import pytest
import tiny_training
import torch

from opensora_cli.data.captions import known_words
from opensora_cli.data.scenes import Colour, Direction, Place, Scene, Shape, Speed, Thing, Time, Weather
from opensora_cli.engine.train.objectives.task import SampleRng
from opensora_cli.engine.train.objectives.text import (
    QUESTIONS,
    Reading,
    TextTask,
    answers,
    build_vocabulary,
    sample_captions,
)

THING = Thing(Shape.BOAT, Colour.BLUE, Direction.RIGHT, Speed.FAST)
SCENE = Scene(Place.FOREST, Weather.SNOW, Time.SUNSET, THING, seed=0)


class TestAnswers:
    def test_of_a_thing(self):
        assert answers(SCENE) == [2, 2, 1, 1, 3, 1, 1]

    def test_of_an_empty_place(self):
        assert answers(dataclasses.replace(SCENE, thing=None)) == [2, 2, 1, 4, 4, 2, 2]

    def test_are_among_the_choices(self):
        assert list(QUESTIONS.values()) == [4, 3, 3, 5, 5, 3, 3]


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
        task = TextTask(tiny_training.text_settings("unused").text)
        optimizer = torch.optim.AdamW(task.module.parameters(), lr=1e-2)
        right = []
        for step in range(30):
            batch = sample_captions(SampleRng.of_data(0, step), step, batch_size=32)
            loss, figures = task.loss(batch, SampleRng.of(0, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right.append((figures["t5_right"], figures["clip_right"]))
        first, last = np.mean(right[:3], axis=0), np.mean(right[-3:], axis=0)
        assert np.all(last > first + 0.1)
        assert np.all(last <= 1.0)

    def test_a_batch_is_of_its_number_alone(self):
        one, same, other = (sample_captions(SampleRng.of_data(0, number), number, batch_size=3) for number in (5, 5, 6))
        assert one.captions == same.captions != other.captions
        assert torch.equal(one.answers_BQ, same.answers_BQ)
        task = TextTask(tiny_training.text_settings("unused").text)
        assert (task.samples(one), task.tokens(one), one.paths) == (3, 3 * 24, one.captions)
