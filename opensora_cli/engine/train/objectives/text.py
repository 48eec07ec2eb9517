"""Training the demo's two small text encoders, jointly, on captions of the procedural world.

Each learns to classify from a caption what the scene shows: place, weather, time of day, and the moving thing with its
colour, direction and speed. For what a caption leaves out, the encoders learn its probability.

They are then frozen: T5's token embeddings and CLIP's pooled one condition the video transformer.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from opensora_cli.core.files import atomic_folder, write_json_atomic
from opensora_cli.core.transfers import queued_copy
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
from opensora_cli.engine.train.ema import module_state
from opensora_cli.engine.train.files import CLIP_FOLDER, T5_FOLDER, VOCABULARY_FILE
from opensora_cli.engine.train.objectives.task import SampleRng
from opensora_cli.models.text.folder import quiet
from opensora_cli.settings.train_objectives import TextTrainSettings

UNKNOWN = "<unk>"
# Question -> number of answers; the last answer of the four about the thing is that there is none.
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
    thing = scene.thing
    return [
        list(Place).index(scene.place),
        list(Weather).index(scene.weather),
        list(Time).index(scene.time),
        list(Shape).index(thing.shape) if thing else len(Shape),
        list(Colour).index(thing.colour) if thing else len(Colour),
        list(Direction).index(thing.direction) if thing else len(Direction),
        list(Speed).index(thing.speed) if thing else len(Speed),
    ]


def build_tokenizer(*, max_length: int, start: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the world's words, in lower case; others become `<unk>`.

    `max_length` is in tokens, after padding and cutting. `start` puts a start token in front, as CLIP has it; an end
    token always follows.
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token=UNKNOWN,
        model_max_length=max_length,
    )


class TextEncoders(nn.Module):
    """Both encoders, and classification heads, which are not exported."""

    def __init__(
        self,
        settings: TextTrainSettings,
        *,
        t5_tokenizer: PreTrainedTokenizerFast,
        clip_tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        super().__init__()
        self.t5 = T5EncoderModel(_t5_config(settings, t5_tokenizer))
        self.clip = CLIPTextModel(_clip_config(settings, clip_tokenizer))
        self.t5_heads = nn.ModuleDict({name: nn.Linear(settings.t5_width, n) for name, n in QUESTIONS.items()})
        self.clip_heads = nn.ModuleDict({name: nn.Linear(settings.clip_width, n) for name, n in QUESTIONS.items()})

    def forward(self, t5_ids_BL: Tensor, clip_ids_BL: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each question the logits of T5, from the mean over tokens, and of CLIP, from the pooled output."""
        t5_BC = self.t5(input_ids=t5_ids_BL).last_hidden_state.mean(dim=1)
        clip_BC = self.clip(input_ids=clip_ids_BL).pooler_output
        return {name: (self.t5_heads[name](t5_BC), self.clip_heads[name](clip_BC)) for name in QUESTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionBatch:
    """Captions, and the right answer to each of `QUESTIONS`."""

    number: int
    captions: tuple[str, ...]
    answers_BQ: Tensor

    @property
    def paths(self) -> tuple[str, ...]:
        """The captions, which are all there is."""
        return self.captions


def sample_captions(rng: SampleRng, number: int, *, batch_size: int) -> CaptionBatch:
    """Return a micro-batch of captions of random scenes."""
    scenes = [sample_scene(rng.numpy) for _ in range(batch_size)]
    captions = tuple(_disturbed(caption_scene(scene, rng.numpy), rng.numpy) for scene in scenes)
    return CaptionBatch(number=number, captions=captions, answers_BQ=torch.tensor([answers(scene) for scene in scenes]))


class TextTask:
    """Cross-entropy of every question, summed over both encoders."""

    adversary = None

    def __init__(self, settings: TextTrainSettings) -> None:
        self.t5_tokenizer = build_tokenizer(max_length=settings.t5_max_length, start=False)
        self.clip_tokenizer = build_tokenizer(max_length=settings.clip_max_length, start=True)
        self._encoders = TextEncoders(settings, t5_tokenizer=self.t5_tokenizer, clip_tokenizer=self.clip_tokenizer)
        self.module: nn.Module = self._encoders
        self.forward: Callable[..., Any] = self._encoders

    def begin_step(self, step: int, ema: Mapping[str, Tensor] | None) -> None:
        """Do nothing: there is one phase."""

    def loss(self, batch: CaptionBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch of captions, and how many questions were answered as the scene has it."""
        device = next(self.module.parameters()).device
        t5_ids, clip_ids = (
            queued_copy(_ids(tokenizer, batch.captions), device)
            for tokenizer in (self.t5_tokenizer, self.clip_tokenizer)
        )
        logits = self.forward(t5_ids, clip_ids)
        loss = torch.zeros((), device=device)
        right = {"t5_right": torch.zeros_like(loss), "clip_right": torch.zeros_like(loss)}
        answers_BQ = queued_copy(batch.answers_BQ, device)
        for (by_t5, by_clip), answers_B in zip(logits.values(), answers_BQ.unbind(1), strict=True):
            for name, logits_BA in (("t5_right", by_t5), ("clip_right", by_clip)):
                loss = loss + nn.functional.cross_entropy(logits_BA.float(), answers_B)
                right[name] += (logits_BA.argmax(-1) == answers_B).float().mean() / len(logits)
        return loss, right

    def tokens(self, batch: CaptionBatch) -> int:
        """Return how many tokens both encoders read."""
        lengths = (self.t5_tokenizer.model_max_length, self.clip_tokenizer.model_max_length)
        return len(batch.captions) * sum(lengths)

    def samples(self, batch: CaptionBatch) -> int:
        return len(batch.captions)

    @torch.no_grad()
    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the folders `t5` and `clip` in transformers' form, and what they know as `vocabulary.json`."""
        encoders = deepcopy(self._encoders).cpu()
        state = module_state(encoders)
        for name, weight in weights.items():
            state[name].copy_(weight)
        for name, model, tokenizer in (
            (T5_FOLDER, encoders.t5, self.t5_tokenizer),
            (CLIP_FOLDER, encoders.clip, self.clip_tokenizer),
        ):
            with atomic_folder(folder / name) as temporary, quiet():
                model.save_pretrained(temporary)
                tokenizer.save_pretrained(temporary)
        write_json_atomic(folder / VOCABULARY_FILE, vocabulary())


def _t5_config(settings: TextTrainSettings, tokenizer: PreTrainedTokenizerFast) -> T5Config:
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=settings.t5_width,
        d_kv=settings.t5_width // settings.t5_heads,
        d_ff=2 * settings.t5_width,
        num_layers=settings.t5_layers,
        num_heads=settings.t5_heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )


def _clip_config(settings: TextTrainSettings, tokenizer: PreTrainedTokenizerFast) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.clip_width,
        intermediate_size=2 * settings.clip_width,
        projection_dim=settings.clip_width,
        num_hidden_layers=settings.clip_layers,
        num_attention_heads=settings.clip_heads,
        max_position_embeddings=settings.clip_max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _ids(tokenizer: PreTrainedTokenizerFast, captions: Sequence[str]) -> Tensor:
    tokens = tokenizer(list(captions), padding="max_length", truncation=True, return_tensors="pt")
    ids: Tensor = tokens.input_ids
    return ids


def _disturbed(caption: str, rng: np.random.Generator) -> str:
    """Put an unknown word or a full stop into some captions, for robustness to other ways of writing."""
    words = caption.split(" ")
    while rng.random() < 0.2:
        words.insert(int(rng.integers(len(words) + 1)), UNKNOWN)
    return " ".join(words) + ("." if rng.random() < 0.2 else "")
