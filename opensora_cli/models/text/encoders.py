"""The text encoders: T5 for the prompt's tokens, CLIP for its pooled meaning, both from a local transformers folder."""

import re
import unicodedata
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.models.text import folder as folders
from opensora_cli.models.text.files import CLIP_VOCABULARIES, T5_VOCABULARIES, require_files
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import fuse_t5_norms
from opensora_cli.models.text.tokenizer import Tokenizer


class PromptReader:
    """How an encoder reads prompts: with its tokenizer, up to one length."""

    def __init__(self, *, tokenizer: Tokenizer, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length

    def truncated(self, text: str) -> bool:
        """Whether `text` has more tokens, special ones included, than the encoder reads."""
        return len(self.tokenizer.ids(text)) > self.max_length

    def unknown_words(self, text: str) -> list[str]:
        """Return the words of `text` (emoji, too) that the vocabulary cannot spell, each once, in their order."""
        words = dict.fromkeys(word for word in map(_bare, re.findall(r"\w+|[^\w\s]+", text)) if word)
        return [word for word in words if not self.tokenizer.can_spell(word)]


class _FolderEncoder(PromptReader):
    """A frozen text model with its tokenizer; texts are padded and cut to one length."""

    _vocabularies: tuple[tuple[str, ...], ...] = ()

    def __init__(self, *, model: Any, tokenizer: Tokenizer, max_length: int, device: torch.device | str) -> None:
        super().__init__(tokenizer=tokenizer, max_length=max_length)
        self.model = model
        self.device = torch.device(device)

    def _input_ids(self, texts: list[str]) -> Tensor:
        return torch.tensor(self.tokenizer.padded_ids(texts, self.max_length)).to(self.device)


class T5Encoder(_FolderEncoder):
    """The encoder of a T5 (Raffel et al. 2020)."""

    _vocabularies = T5_VOCABULARIES

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        max_length: int,
        device: torch.device | str,
        dtype: torch.dtype,
        blocks_on_host: bool = False,
        blocks_dtype: torch.dtype | None = None,
    ) -> Self:
        """Load a transformers folder without any request to a network.

        The folder has config.json, weights, and spiece.model or tokenizer.json; a full T5's decoder is skipped. Every
        text is padded or cut to `max_length` tokens. With `blocks_on_host`, `blocks` stay on the CPU, in `blocks_dtype`
        (None: `dtype`), mapped from a file that has them in it; the encoder cannot be used until they are brought to
        the device and to `dtype`.

        Raises:
            CheckpointError: files are missing (all are named) or broken, or contradict each other.
            HardwareError: the vocabulary needs a library that is not installed.
        """
        folder = Path(path)
        tokenizer = cls.reader(folder, max_length=max_length).tokenizer
        from transformers import T5EncoderModel

        ignored = ("decoder.", "lm_head.")
        model = folders.load_model(T5EncoderModel, folder, dtype=blocks_dtype or dtype, ignored_prefixes=ignored)
        fuse_t5_norms(model)
        blocks = model.encoder.block
        if blocks_on_host:
            model.encoder.block = nn.ModuleList()
        model.to(device=device, dtype=None if blocks_dtype is None else dtype)
        model.encoder.block = blocks
        return cls(model=model, tokenizer=tokenizer, max_length=max_length, device=device)

    @classmethod
    def reader(cls, path: str | Path, *, max_length: int) -> PromptReader:
        """Return how the encoder in a folder reads prompts, without its weights; errors as `from_folder`."""
        folder = Path(path)
        require_files(folder, vocabularies=cls._vocabularies)
        tokenizer = folders.load_tokenizer(folder, vocab_size=T5Sizes.of(folder).vocab_size)
        return PromptReader(tokenizer=tokenizer, max_length=max_length)

    @property
    def blocks(self) -> nn.ModuleList:
        """The layers, in the order in which they run: all of the weights but the table of tokens and a norm."""
        blocks: nn.ModuleList = self.model.encoder.block
        return blocks

    @torch.no_grad()
    def encode(self, texts: list[str]) -> Tensor:
        """Return the last hidden state, (B, max_length, C).

        There is no attention mask: the released model was trained on states that attend to the padding.
        """
        states: Tensor = self.model(input_ids=self._input_ids(texts)).last_hidden_state
        return states


class ClipEncoder(_FolderEncoder):
    """The text tower of a CLIP (Radford et al. 2021)."""

    _vocabularies = CLIP_VOCABULARIES

    @classmethod
    def from_folder(cls, path: str | Path, *, max_length: int, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Load a transformers folder without any request to a network.

        The folder has config.json, weights, and tokenizer.json or vocab.json + merges.txt; a full CLIP's image tower is
        skipped. Every text is padded or cut to `max_length` tokens.

        Raises:
            CheckpointError: files are missing (all are named) or broken, or contradict each other.
            RequestError: `max_length` is over the model's positions.
        """
        folder = Path(path)
        tokenizer = cls.reader(folder, max_length=max_length).tokenizer
        from transformers import CLIPTextModel

        # Files of older versions carry the position ids, which are a constant.
        position_ids = ("text_model.embeddings.position_ids", "embeddings.position_ids")
        ignored = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale", *position_ids)
        model = folders.load_model(CLIPTextModel, folder, dtype=dtype, ignored_prefixes=ignored)
        return cls(model=model.to(device), tokenizer=tokenizer, max_length=max_length, device=device)

    @classmethod
    def reader(cls, path: str | Path, *, max_length: int) -> PromptReader:
        """Return how the encoder in a folder reads prompts, without its weights; errors as `from_folder`."""
        folder = Path(path)
        require_files(folder, vocabularies=cls._vocabularies)
        sizes = ClipSizes.of(folder)
        if max_length > sizes.max_length:
            raise RequestError(
                f"text.clip_max_length={max_length} is over the {sizes.max_length} positions of {folder}"
            )
        tokenizer = folders.load_tokenizer(folder, vocab_size=sizes.vocab_size)
        _require_end_token(folder, tokenizer, sizes.end_id)
        return PromptReader(tokenizer=tokenizer, max_length=max_length)

    @torch.no_grad()
    def encode(self, texts: list[str]) -> Tensor:
        """Return the pooled output, (B, C): the final state at the token that ends the text."""
        pooled: Tensor = self.model(input_ids=self._input_ids(texts)).pooler_output
        return pooled


def _require_end_token(folder: Path, tokenizer: Tokenizer, end_id: int) -> None:
    # With end_id 2 (OpenAI's files) transformers pools at the largest id; otherwise at end_id, and at the first token
    # where there is none, which would make every prompt mean the same.
    if end_id != 2 and end_id not in tokenizer.ids("a"):
        raise CheckpointError(
            f"the tokenizer in {folder} does not end a text with token {end_id}, where its model pools"
        )


def _bare(word: str) -> str:
    """Strip punctuation (not symbols such as emoji) from both ends."""
    start, end = 0, len(word)
    while start < end and unicodedata.category(word[start]).startswith("P"):
        start += 1
    while end > start and unicodedata.category(word[end - 1]).startswith("P"):
        end -= 1
    return word[start:end]
