"""Token ids are those of transformers, which this package does not need."""

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import sentencepiece
import transformers
from tokenizers import models, pre_tokenizers

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.models.text import tokenizer as tokenizers_of_folders
from opensora_cli.models.text.tokenizer import load_tokenizer

TEXTS = [
    *("raining, sea", "  A red BOAT,on the\tsea!", "a zebra ☃ at night", "", "sea</s> boat <pad> <unk> <s>"),
    *(
        "ＳＥＡ ﬁne",
        "sea " * 60,
        "don't, we've 3.14 <extra_id_7>",
        "e\u0301 \u200b\u00a0▁sea",
        "<|endoftext|>海 🙂\x00",
    ),
]
EXTRA = [f"<extra_id_{index}>" for index in range(100)]


@pytest.fixture
def demo():
    return lambda name: packaged_demo() / name


@pytest.fixture
def pieces(tmp_path):
    """Return a function that makes the folder of a T5 as it is published."""

    def make(stated):
        drawn = random.Random(0)
        words = ["".join(drawn.choices("abcdefghinorstu,.AS", k=drawn.randint(1, 8))) for _ in range(200)]
        sentences = [" ".join(drawn.choices(words, k=9)) for _ in range(300)]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*sentences, *TEXTS[:3]]), model_prefix=str(tmp_path / "spiece"), vocab_size=150,
            hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=3,
        )  # fmt: skip
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
        if stated:
            names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
            names |= {"additional_special_tokens": EXTRA}
            for name in ("special_tokens_map.json", "tokenizer_config.json"):
                (tmp_path / name).write_text(json.dumps(names))
        return tmp_path

    return make


@pytest.fixture
def pairs(tmp_path):
    """Return a function that makes the folder of a CLIP as it is published: two files, or one."""

    def make(in_one_file):
        letters = pre_tokenizers.ByteLevel.alphabet()
        vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "se", "sea</w>", "ra"]
        vocabulary += ["<|startoftext|>", "<|endoftext|>"]
        merges = [("s", "e"), ("se", "a</w>"), ("r", "a")]
        models.BPE({piece: index for index, piece in enumerate(vocabulary)}, merges).save(str(tmp_path))
        (tmp_path / "config.json").write_text('{"model_type": "clip"}')
        if in_one_file:
            transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
            assert (tmp_path / "tokenizer.json").is_file()
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("kind", "detail"),
    [("demo", "t5"), ("demo", "clip"), ("pieces", True), ("pieces", False), ("pairs", True), ("pairs", False)],
)
def test_ids_are_those_of_transformers(request, kind, detail):
    folder = request.getfixturevalue(kind)(detail)
    own = load_tokenizer(folder, vocab_size=10_000)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for length in (8, 32):
        padded = theirs(TEXTS, padding="max_length", truncation=True, max_length=length).input_ids
        assert own.padded_ids(TEXTS, length) == padded
    assert [own.ids(text) for text in TEXTS] == theirs(TEXTS).input_ids
    assert [own.ids(text, with_special=False) for text in TEXTS] == theirs(TEXTS, add_special_tokens=False).input_ids
    assert own.vocabulary == theirs.get_vocab()
    assert own.words == set(theirs.get_vocab()) - set(theirs.all_special_tokens)
    assert own.can_spell("raining")
    assert own.can_spell("☃☃") is (kind == "pairs")


def test_files_are_read_again_only_after_a_change(tmp_path, monkeypatch):
    shutil.copytree(packaged_demo() / "t5", tmp_path, dirs_exist_ok=True)
    read, stated = [], tokenizers_of_folders._stated_tokens
    monkeypatch.setattr(tokenizers_of_folders, "_stated_tokens", lambda folder: read.append(folder) or stated(folder))
    for _ in range(2):
        load_tokenizer(tmp_path, vocab_size=10_000)
    assert len(read) == 1
    (tmp_path / "tokenizer_config.json").touch()
    load_tokenizer(tmp_path, vocab_size=10_000)
    assert len(read) == 2


def test_an_empty_padding_token_is_refused(pairs):
    folder = pairs(in_one_file=False)
    (folder / "tokenizer_config.json").write_text('{"pad_token": ""}')
    with pytest.raises(CheckpointError, match="has no padding token"):
        load_tokenizer(folder, vocab_size=10_000)


def test_texts_are_padded_to_the_length_alone_on_the_side_of_the_file(tmp_path):
    shutil.copytree(packaged_demo() / "t5", tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["padding"] = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": 64}
    content["padding"] |= {"pad_id": 3, "pad_type_id": 0, "pad_token": "sea"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path, vocab_size=10_000)
    ids = tokenizer.ids("sea")
    assert tokenizer.padded_ids(["sea"], 6) == [[0] * (6 - len(ids)) + ids]


def test_threads_share_a_tokenizer():
    tokenizer = load_tokenizer(packaged_demo() / "t5", vocab_size=10_000)
    expected = tokenizer.ids("sea"), tokenizer.padded_ids(TEXTS, 32)
    with ThreadPoolExecutor(2) as threads:
        ids = threads.map(lambda _: tokenizer.ids("sea"), range(500))
        padded = threads.map(lambda _: tokenizer.padded_ids(TEXTS, 32), range(500))
        assert all(pair == expected for pair in zip(ids, padded, strict=True))
