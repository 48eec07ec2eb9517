"""Token ids without transformers: the same that it gives, and only where it has nothing to add."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers

from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.models.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    *("raining, sea", "  A red BOAT,on the\tsea!", "a zebra ☃ at night", "", "sea</s> boat <pad> <unk> <s>"),
    *("ＳＥＡ ﬁne", "sea " * 60),
]


@pytest.mark.parametrize("name", ["t5", "clip"])
def test_ids_are_those_of_transformers(name):
    folder = packaged_demo() / name
    own = Tokenizer.of_one_file(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for length in (8, 32):
        padded = theirs(TEXTS, padding="max_length", truncation=True, max_length=length).input_ids
        assert own.padded_ids(TEXTS, length) == padded
    assert [own.ids(text) for text in TEXTS] == theirs(TEXTS).input_ids
    assert [own.ids(text, with_special=False) for text in TEXTS] == theirs(TEXTS, add_special_tokens=False).input_ids
    assert own.vocabulary == theirs.get_vocab()
    assert own.words == set(theirs.get_vocab()) - set(theirs.all_special_tokens)
    assert own.can_spell("raining")
    assert not own.can_spell("zebra")


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "T5Tokenizer"},
        {"add_bos_token": True},
        {"pad_token": {"content": "<pad>", "lstrip": True}},
        {"eos_token": "sea"},
        {"model_max_length": {}},
    ],
)
def test_transformers_is_asked_where_it_may_add_something(tmp_path, change):
    shutil.copytree(packaged_demo() / "t5", tmp_path, dirs_exist_ok=True)
    assert Tokenizer.of_one_file(tmp_path) is not None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert Tokenizer.of_one_file(tmp_path) is None


def test_files_are_read_again_only_after_a_change(tmp_path, monkeypatch):
    shutil.copytree(packaged_demo() / "t5", tmp_path, dirs_exist_ok=True)
    read, of_one_file = [], Tokenizer.of_one_file
    monkeypatch.setattr(Tokenizer, "of_one_file", lambda folder: read.append(folder) or of_one_file(folder))
    for _ in range(2):
        load_tokenizer(tmp_path, vocab_size=10_000)
    assert len(read) == 1
    (tmp_path / "tokenizer_config.json").touch()
    load_tokenizer(tmp_path, vocab_size=10_000)
    assert len(read) == 2


def test_threads_share_a_tokenizer():
    tokenizer = load_tokenizer(packaged_demo() / "t5", vocab_size=10_000)
    expected = tokenizer.ids("sea"), tokenizer.padded_ids(TEXTS, 32)
    with ThreadPoolExecutor(2) as threads:
        ids = threads.map(lambda _: tokenizer.ids("sea"), range(500))
        padded = threads.map(lambda _: tokenizer.padded_ids(TEXTS, 32), range(500))
        assert all(pair == expected for pair in zip(ids, padded, strict=True))
