"""Training the demo's two small text encoders, jointly, on captions of the procedural world.

Each learns to classify from a caption what the scene shows: place, weather, time of day, and the moving thing with its
colour, direction and speed. For what a caption leaves out, the encoders learn its probability.

They are then frozen: T5's token embeddings and CLIP's pooled one condition the video transformer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Vocabulary
from torch import Tensor, nn

from demo_world.captions import SYNONYMS, known_words, sample_caption, vocabulary
from demo_world.scenes import Colour, Direction, Place, Scene, Shape, Speed, Time, Weather, sample_scene
from demo_world.settings import TextEncoderSettings
from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.device import queued_copy
from opensora_cli.core.files import atomic_folder, write_json_atomic
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.train.optimizer import module_state
from opensora_cli.engine.train.trainer import Task
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.text.tokenizer import Tokenizer

T5_FOLDER, CLIP_FOLDER, VOCABULARY_FILE = "t5", "clip", "vocabulary.json"
UNKNOWN = "<unk>"
_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": UNKNOWN, "bos_token": "<s>"}
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


def build_vocabulary(*, start: bool) -> Vocabulary:
    """Return a tokenizer of the world's words and their synonyms, in lower case; others become `<unk>`.

    `start` puts a start token in front of a text, as CLIP has it; an end token always follows.
    """
    words = {word: index for index, word in enumerate([*_SPECIAL.values(), ",", ".", *known_words()])}
    vocabulary = Vocabulary(models.WordLevel(vocab=words, unk_token=UNKNOWN))
    vocabulary.add_special_tokens([*_SPECIAL.values()])
    vocabulary.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), *_replaced_synonyms()])
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    vocabulary.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if start else "$A </s>", special_tokens=[(word, words[word]) for word in ("<s>", "</s>")]
    )
    return vocabulary


def _replaced_synonyms() -> list[normalizers.Normalizer]:
    return [normalizers.Replace(Regex(rf"\b({'|'.join(synonyms)})\b"), word) for word, synonyms in SYNONYMS.items()]


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokenizer of one of the encoders."""

    vocabulary: Vocabulary
    max_length: int

    def ids(self, captions: Sequence[str]) -> Tensor:
        """Return the ids of captions, each padded or cut to `max_length`."""
        return torch.tensor(self._tokenizer.padded_ids(captions, self.max_length))

    def id(self, name: str) -> int:
        """Return that of one of `_SPECIAL`."""
        return self.vocabulary.get_vocab()[_SPECIAL[name]]

    def save(self, folder: Path) -> None:
        """Write it as transformers reads it."""
        self._tokenizer.padded_ids([""], self.max_length)  # the file has the length
        self.vocabulary.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": self.max_length}
        write_json_atomic(folder / "tokenizer_config.json", _SPECIAL | settings)

    @property
    def _tokenizer(self) -> Tokenizer:
        special = [*_SPECIAL.values()]
        return Tokenizer(self.vocabulary, pad=_SPECIAL["pad_token"], unknown=UNKNOWN, special=special)


class TextEncoders(nn.Module):
    """Both encoders, and classification heads, which are not exported."""

    def __init__(
        self, settings: TextEncoderSettings, *, t5_config: Mapping[str, object], clip_config: Mapping[str, object]
    ) -> None:
        super().__init__()
        self.t5 = T5Model(T5Sizes.from_config(t5_config, path=Path(T5_FOLDER)))
        self.clip = ClipTextModel(ClipSizes.from_config(clip_config, path=Path(CLIP_FOLDER)))
        _initialize_t5(self.t5)
        _initialize_clip(self.clip)
        self.t5_heads = nn.ModuleDict({name: nn.Linear(settings.t5_width, n) for name, n in QUESTIONS.items()})
        self.clip_heads = nn.ModuleDict({name: nn.Linear(settings.clip_width, n) for name, n in QUESTIONS.items()})

    def forward(self, t5_ids_BL: Tensor, clip_ids_BL: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each question the logits of T5, from the mean over tokens, and of CLIP, from the pooled output."""
        t5_BC = self.t5(t5_ids_BL).mean(dim=1)
        clip_BC = self.clip(clip_ids_BL)
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
    captions = tuple(_disturbed(sample_caption(scene, rng.numpy), rng.numpy) for scene in scenes)
    return CaptionBatch(number=number, captions=captions, answers_BQ=torch.tensor([answers(scene) for scene in scenes]))


class TextTask(Task):
    """Cross-entropy of every question, summed over both encoders."""

    def __init__(self, settings: TextEncoderSettings) -> None:
        self._t5 = Reading(build_vocabulary(start=False), settings.t5_max_length)
        self._clip = Reading(build_vocabulary(start=True), settings.clip_max_length)
        self._t5_config, self._clip_config = _t5_config(settings, self._t5), _clip_config(settings, self._clip)
        self._encoders = TextEncoders(settings, t5_config=self._t5_config, clip_config=self._clip_config)
        super().__init__(self._encoders)

    def loss(self, batch: CaptionBatch, rng: SampleRng) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch of captions, and how many questions were answered as the scene has it."""
        device = next(self.module.parameters()).device
        t5_ids, clip_ids = (queued_copy(reading.ids(batch.captions), device) for reading in (self._t5, self._clip))
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
        return len(batch.captions) * (self._t5.max_length + self._clip.max_length)

    @torch.no_grad()
    def export(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write the folders `t5` and `clip` in transformers' form, and what they know as `vocabulary.json`."""
        state = {**module_state(self._encoders), **weights}
        for name, config, reading in (
            (T5_FOLDER, self._t5_config, self._t5),
            (CLIP_FOLDER, self._clip_config, self._clip),
        ):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            with atomic_folder(folder / name) as temporary:
                write_weights(temporary / "model.safetensors", own, dtype=torch.float32, metadata={"format": "pt"})
                write_json_atomic(temporary / "config.json", config)
                reading.save(temporary)
        write_json_atomic(folder / VOCABULARY_FILE, vocabulary())


def _t5_config(settings: TextEncoderSettings, reading: Reading) -> dict[str, object]:
    return {
        "model_type": "t5",
        "architectures": ["T5EncoderModel"],
        "vocab_size": reading.vocabulary.get_vocab_size(),
        "d_model": settings.t5_width,
        "d_kv": settings.t5_width // settings.t5_heads,
        "d_ff": 2 * settings.t5_width,
        "num_layers": settings.t5_layers,
        "num_heads": settings.t5_heads,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "is_encoder_decoder": False,
    }


def _clip_config(settings: TextEncoderSettings, reading: Reading) -> dict[str, object]:
    return {
        "model_type": "clip_text_model",
        "architectures": ["CLIPTextModel"],
        "vocab_size": reading.vocabulary.get_vocab_size(),
        "hidden_size": settings.clip_width,
        "intermediate_size": 2 * settings.clip_width,
        "projection_dim": settings.clip_width,
        "num_hidden_layers": settings.clip_layers,
        "num_attention_heads": settings.clip_heads,
        "max_position_embeddings": settings.clip_max_length,
        **{f"{name}_id": reading.id(name) for name in ("pad_token", "bos_token", "eos_token")},
    }


@torch.no_grad()
def _initialize_t5(model: T5Model) -> None:
    """Give it weights as T5 (Raffel et al. 2020) starts: products of queries and keys are not scaled."""
    sizes = model.sizes
    inner = sizes.num_heads * sizes.d_kv
    spreads = {"q": (sizes.d_model * sizes.d_kv) ** -0.5, "o": inner**-0.5, "wo": sizes.d_ff**-0.5}
    for path, module in model.encoder.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=spreads.get(path.rpartition(".")[2], sizes.d_model**-0.5))


@torch.no_grad()
def _initialize_clip(model: ClipTextModel) -> None:
    """Give it weights as CLIP (Radford et al. 2021) starts."""
    width, layers = model.sizes.hidden_size, model.sizes.num_layers
    inward = (2 * width * layers) ** -0.5
    spreads = {"out_proj": width**-0.5, "fc1": (2 * width) ** -0.5}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.02)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(std=spreads.get(path.rpartition(".")[2], inward))
            module.bias.zero_()


def _disturbed(caption: str, rng: np.random.Generator) -> str:
    """Put an unknown word or a full stop into some captions, for robustness to other ways of writing."""
    words = caption.split(" ")
    while rng.random() < 0.2:
        words.insert(int(rng.integers(len(words) + 1)), UNKNOWN)
    return " ".join(words) + ("." if rng.random() < 0.2 else "")
