"""Training the demo's two small text encoders, together, on captions of the procedural world.

Each learns to tell from a caption what the scene shows: place, weather, time of day, and the moving thing with its
colour, direction and speed. What a caption leaves unsaid cannot be told, so the encoders learn how likely it is. They
are then frozen: T5's token embeddings and CLIP's pooled one condition the video transformer.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from opensora_cli.core.files import write_json_atomic
from opensora_cli.data.scenes import (
    Colour,
    Direction,
    Place,
    Scene,
    Shape,
    Speed,
    Time,
    Weather,
    caption_scene,
    known_words,
    sample_scene,
    vocabulary,
)
from opensora_cli.settings.train import TextTrainSettings

UNKNOWN = "<unk>"
# One question a head answers; the last answer of the four about the thing is that there is none.
QUESTIONS: dict[str, int] = {
    "place": len(Place),
    "weather": len(Weather),
    "time": len(Time),
    "shape": len(Shape) + 1,
    "colour": len(Colour) + 1,
    "direction": len(Direction) + 1,
    "speed": len(Speed) + 1,
}


def answers(scene: Scene) -> list[int]:
    """Return the right answer to each of `QUESTIONS`, as an index."""
    found = [list(Place).index(scene.place), list(Weather).index(scene.weather), list(Time).index(scene.time)]
    if scene.thing is None:
        return found + [len(Shape), len(Colour), len(Direction), len(Speed)]
    thing = scene.thing
    return found + [
        list(Shape).index(thing.shape),
        list(Colour).index(thing.colour),
        list(Direction).index(thing.direction),
        list(Speed).index(thing.speed),
    ]


def build_tokenizer(*, max_length: int, start: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the world's words, in lower case; others become `<unk>`.

    Args:
        max_length: tokens after padding and cutting.
        start: put a start token in front, as CLIP has it; an end token always follows.
    """
    special = ["<pad>", "</s>", UNKNOWN, "<s>"]
    words = {word: index for index, word in enumerate([*special, ",", ".", *known_words()])}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if start else "$A </s>", special_tokens=[(word, words[word]) for word in ("<s>", "</s>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token=UNKNOWN,
        model_max_length=max_length,
    )


class _Encoders(nn.Module):
    """Both encoders and the heads that question them, which are thrown away after training."""

    def __init__(self, settings: TextTrainSettings, *, t5_vocabulary: int, clip_tokenizer: Any) -> None:
        super().__init__()
        self.t5 = T5EncoderModel(
            T5Config(
                vocab_size=t5_vocabulary,
                d_model=settings.t5_width,
                d_kv=settings.t5_width // settings.t5_heads,
                d_ff=2 * settings.t5_width,
                num_layers=settings.t5_layers,
                num_heads=settings.t5_heads,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
                dropout_rate=0.0,
            )
        )
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip_tokenizer),
                hidden_size=settings.clip_width,
                intermediate_size=2 * settings.clip_width,
                projection_dim=settings.clip_width,
                num_hidden_layers=settings.clip_layers,
                num_attention_heads=settings.clip_heads,
                max_position_embeddings=settings.clip_max_length,
                pad_token_id=clip_tokenizer.pad_token_id,
                bos_token_id=clip_tokenizer.bos_token_id,
                eos_token_id=clip_tokenizer.eos_token_id,
            )
        )
        self.t5_heads = nn.ModuleDict({name: nn.Linear(settings.t5_width, n) for name, n in QUESTIONS.items()})
        self.clip_heads = nn.ModuleDict({name: nn.Linear(settings.clip_width, n) for name, n in QUESTIONS.items()})

    def forward(self, t5_ids: Tensor, clip_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each question the logits of T5, from the mean over tokens, and of CLIP, from the pooled output."""
        t5_BC = self.t5(input_ids=t5_ids).last_hidden_state.mean(dim=1)
        clip_BC = self.clip(input_ids=clip_ids).pooler_output
        return {name: (self.t5_heads[name](t5_BC), self.clip_heads[name](clip_BC)) for name in QUESTIONS}


class TextTask:
    """Cross-entropy of every question, summed over both encoders."""

    def __init__(self, settings: TextTrainSettings, *, batch_size: int) -> None:
        self._settings = settings
        self._batch_size = batch_size
        self.t5_tokenizer = build_tokenizer(max_length=settings.t5_max_length, start=False)
        self.clip_tokenizer = build_tokenizer(max_length=settings.clip_max_length, start=True)
        self.encoders = _Encoders(settings, t5_vocabulary=len(self.t5_tokenizer), clip_tokenizer=self.clip_tokenizer)
        self.module: nn.Module = self.encoders

    def loss(self, step: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch of captions, and how many questions were answered as the scene has it."""
        scenes = [sample_scene(rng) for _ in range(self._batch_size)]
        captions = [_disturbed(caption_scene(scene, rng), rng) for scene in scenes]
        expected = torch.tensor([answers(scene) for scene in scenes])
        logits = self.encoders(_ids(self.t5_tokenizer, captions), _ids(self.clip_tokenizer, captions))
        loss = torch.zeros(())
        right = {"t5_right": 0.0, "clip_right": 0.0}
        for column, (by_t5, by_clip) in enumerate(logits.values()):
            wanted = expected[:, column]
            loss = loss + F.cross_entropy(by_t5.float(), wanted) + F.cross_entropy(by_clip.float(), wanted)
            right["t5_right"] += float((by_t5.argmax(-1) == wanted).float().mean()) / len(logits)
            right["clip_right"] += float((by_clip.argmax(-1) == wanted).float().mean()) / len(logits)
        return loss, right

    def export(self, ema: nn.Module, folder: Path) -> None:
        """Write the folders `t5` and `clip` in transformers' form, and what they know as `vocabulary.json`."""
        assert isinstance(ema, _Encoders)
        for name, model, tokenizer in (("t5", ema.t5, self.t5_tokenizer), ("clip", ema.clip, self.clip_tokenizer)):
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        write_json_atomic(folder / "vocabulary.json", vocabulary())


def _ids(tokenizer: Any, captions: Sequence[str]) -> Tensor:
    tokens = tokenizer(list(captions), padding="max_length", truncation=True, return_tensors="pt")
    ids: Tensor = tokens.input_ids
    return ids


def _disturbed(caption: str, rng: np.random.Generator) -> str:
    """Put an unknown word or a full stop into some captions, so that strangers' ways of writing do no harm."""
    words = caption.split(" ")
    while rng.random() < 0.2:
        words.insert(int(rng.integers(len(words) + 1)), UNKNOWN)
    return " ".join(words) + ("." if rng.random() < 0.2 else "")
