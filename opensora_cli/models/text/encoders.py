"""Text encoders from local transformers folders: T5 for the tokens of a prompt, and CLIP for its pooled embedding."""

import re
import unicodedata
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import CLIP_VOCABULARIES, T5_VOCABULARIES, ClipSizes, T5Sizes, require_files
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.models.text.tokenizer import Tokenizer, load_tokenizer

Model = TypeVar("Model", bound=nn.Module)


class PromptReader:
    """Reader of prompts for an encoder, with its tokenizer and maximum length."""

    def __init__(self, *, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length

    def truncated(self, text: str) -> bool:
        """Return whether `text` has more tokens, including special ones, than the encoder reads."""
        return len(self.tokenizer.ids(text)) > self.max_length

    def unknown_words(self, text: str) -> list[str]:
        """Return the words of `text` (emoji, too) that the vocabulary cannot spell, each once, in their order."""
        spaced = "".join(" " if unicodedata.category(char).startswith("P") else char for char in text)
        words = dict.fromkeys(re.findall(r"\w+|[^\w\s]+", spaced))
        return [word for word in words if not self.tokenizer.can_spell(word)]


class _FolderEncoder(PromptReader, Generic[Model]):
    """A frozen text model with its tokenizer; texts are padded and cut to one length."""

    def __init__(self, *, model: Model, tokenizer: Tokenizer, max_length: int, device: torch.device | str) -> None:
        super().__init__(tokenizer=tokenizer, max_length=max_length)
        self.model = model.requires_grad_(False).eval()
        self.device = torch.device(device)

    @torch.no_grad()
    def encode(self, texts: list[str]) -> Tensor:
        """Return the output of the model, without a mask: T5 was trained to attend to padding, and CLIP is causal."""
        outputs: Tensor = self.model(self._input_ids(texts))
        return outputs

    def _input_ids(self, texts: list[str]) -> Tensor:
        return torch.tensor(self.tokenizer.padded_ids(texts, self.max_length)).to(self.device)


class T5Encoder(_FolderEncoder[T5Model]):
    """Encoder of a T5 (Raffel et al. 2020), which returns the last hidden states (B, max_length, C)."""

    @classmethod
    def reader(cls, path: str | Path, *, max_length: int) -> PromptReader:
        """Return the reader of prompts for the encoder in a folder, without its weights.

        The folder has config.json, weights, and spiece.model or tokenizer.json; no network is used. Raises
        CheckpointError if files are missing (all are named) or broken, or contradict each other.
        """
        require_files(Path(path), vocabularies=T5_VOCABULARIES)
        tokenizer = load_tokenizer(Path(path), vocab_size=T5Sizes.of(Path(path)).vocab_size)
        return PromptReader(tokenizer=tokenizer, max_length=max_length)

    @property
    def blocks(self) -> nn.ModuleList:
        """Layers in the order in which they run."""
        return self.model.layers


class ClipEncoder(_FolderEncoder[ClipTextModel]):
    """Text tower of a CLIP (Radford et al. 2021), which returns the pooled output (B, C)."""

    @classmethod
    def reader(cls, path: str | Path, *, max_length: int) -> PromptReader:
        """Return the reader of prompts for the encoder in a folder, without its weights.

        The folder has config.json, weights, and tokenizer.json or vocab.json + merges.txt. Raises CheckpointError as
        `T5Encoder.reader` does, and RequestError if `max_length` is over the model's positions.
        """
        folder = Path(path)
        require_files(folder, vocabularies=CLIP_VOCABULARIES)
        sizes = ClipSizes.of(folder)
        if max_length > sizes.max_length:
            raise RequestError(
                f"text.clip_max_length={max_length} is over the {sizes.max_length} positions of {folder}"
            )
        tokenizer = load_tokenizer(folder, vocab_size=sizes.vocab_size)
        # With end_id 2 (OpenAI's files) a CLIP pools at the largest id; otherwise at end_id, and at the first token
        # where there is none, which would make every prompt mean the same.
        if sizes.end_id != 2 and sizes.end_id not in tokenizer.ids("a"):
            raise CheckpointError(
                f"the tokenizer in {folder} does not end a text with token {sizes.end_id}, where its model pools"
            )
        return PromptReader(tokenizer=tokenizer, max_length=max_length)
