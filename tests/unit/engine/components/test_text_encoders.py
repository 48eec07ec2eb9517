"""T5 and CLIP from local folders: the numbers of transformers, and one-line errors for incomplete folders."""

import json
import re
import shutil
import socket

import pytest
import sentencepiece
import torch
import transformers
from closeness import assert_close
from safetensors.torch import load_file, save_file
from tiny_world import WORDS, save_tokenizer
from tokenizers import Tokenizer, models

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.components.architectures import load_clip, load_t5
from opensora_cli.models.text.sizes import T5_VOCABULARIES, missing_files

SENTENCES = ["a night boat on the sea", "rain over the forest at night", "snow in the desert", "a blue ball moves left"]
T5_SIZES = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu"}
CLIP_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CLIP_SIZES |= {"max_position_embeddings": 12, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}


def save_model(folder, model_class, config):
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def t5_words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5_words")
    save_model(folder, transformers.T5EncoderModel, transformers.T5Config(vocab_size=len(WORDS), **T5_SIZES))
    save_tokenizer(folder, "$A </s>")
    return folder


@pytest.fixture(scope="module")
def t5_pieces(tmp_path_factory):
    """Return a folder as published: a T5 with an untied head, and only spiece.model as vocabulary."""
    folder = tmp_path_factory.mktemp("t5_pieces")
    config = transformers.T5Config(vocab_size=256, tie_word_embeddings=False, **T5_SIZES)
    save_model(folder, transformers.T5ForConditionalGeneration, config)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_prefix=str(folder / "spiece"),
        vocab_size=60,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=3,
    )
    (folder / "spiece.vocab").unlink()
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    text = {"vocab_size": len(WORDS), **CLIP_SIZES}
    save_model(folder, transformers.CLIPModel, transformers.CLIPConfig(text_config=text, vision_config=VISION))
    save_tokenizer(folder, "<s> $A </s>")
    return folder


@pytest.fixture
def copied(tmp_path):
    def copy(folder, *, without=()):
        target = tmp_path / folder.name
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*without))
        return target

    return copy


def t5(folder, *, max_length=10, dtype=torch.float32):
    return load_t5(folder, max_length=max_length, device=torch.device("cpu"), dtype=dtype)


def clip_encoder(folder, *, max_length=10, dtype=torch.float32):
    return load_clip(folder, max_length=max_length, device=torch.device("cpu"), dtype=dtype)


class TestT5:
    @pytest.mark.parametrize("folder_name", ["t5_words", "t5_pieces"])
    def test_equals_transformers_without_attention_mask(self, request, folder_name):
        folder = request.getfixturevalue(folder_name)
        texts = ["a night boat on the sea", "raining"]
        encoder = t5(folder, max_length=24)
        states = encoder.encode(texts)
        model = transformers.T5EncoderModel.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokens = tokenizer(texts, padding="max_length", max_length=24, return_tensors="pt")
        with torch.no_grad():
            plain = model(tokens.input_ids).last_hidden_state
            masked = model(**tokens).last_hidden_state
        assert states.shape == (2, 24, 16)
        assert_close(states, plain)
        assert not torch.allclose(states, masked, atol=1e-3)

    def test_a_long_text_is_truncated_before_its_end_token(self, t5_words):
        encoder = t5(t5_words, max_length=4)
        cut = encoder.encode(["a night boat on the sea"])
        assert cut.shape == (1, 4, 16)
        assert torch.equal(cut, encoder.encode(["a night boat raining raining"]))
        ids = encoder._input_ids(["a night boat on the sea"])
        assert ids.tolist() == [[WORDS.index(word) for word in ("a", "night", "boat", "</s>")]]

    @pytest.mark.parametrize(
        ("text", "unknown"),
        [
            ("A night BOAT, on the sea!", []),
            ("a zebra at night. Zebra, a lion: a zebra", ["zebra", "Zebra", "lion"]),
            ("raining ☃, (sea)", ["☃"]),
            ("", []),
        ],
    )
    def test_unknown_words(self, t5_words, text, unknown):
        assert t5(t5_words).unknown_words(text) == unknown

    @pytest.mark.parametrize("text", ["a night boat", " a  night\tboat ", "ﬁne sea", "A zebra, 海.", ""])
    def test_pieces_are_sentencepieces(self, t5_pieces, text):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(t5_pieces / "spiece.model"))
        expected = [*processor.encode(text), 1]
        ids = t5(t5_pieces, max_length=40)._input_ids([text])[0].tolist()
        assert ids == expected + [0] * (40 - len(expected))


class TestClip:
    def test_equals_transformers(self, clip):
        texts = ["a night boat on the sea", "raining"]
        pooled = clip_encoder(clip, max_length=12).encode(texts)
        model = transformers.CLIPTextModel.from_pretrained(clip)
        tokenizer = transformers.AutoTokenizer.from_pretrained(clip)
        with torch.no_grad():
            plain = model(tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt").input_ids)
        assert pooled.shape == (2, 16)
        assert_close(pooled, plain.pooler_output)
        assert_close(pooled[0], plain.last_hidden_state[0, 7])

    def test_byte_pair_vocabulary_as_published(self, tmp_path):
        vocabulary = ["a", "s", "e", "a</w>", "s</w>", "e</w>", "se", "sea</w>", "<|startoftext|>", "<|endoftext|>"]
        (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocabulary)}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\ns e\nse a</w>\n")
        # The published file says that its end token is 2, and means the largest id.
        sizes = CLIP_SIZES | {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
        text = {"vocab_size": len(vocabulary), **sizes}
        save_model(tmp_path, transformers.CLIPModel, transformers.CLIPConfig(text_config=text, vision_config=VISION))
        encoder = clip_encoder(tmp_path, max_length=6)
        assert encoder._input_ids(["Sea sea"]).tolist() == [[8, 7, 7, 9, 9, 9]]
        assert encoder.encode(["sea"]).shape == (1, 16)
        assert not encoder.truncated("sea sea sea sea")
        assert encoder.truncated("sea sea sea sea sea")

    def test_length_over_the_models_positions(self, clip):
        with pytest.raises(RequestError, match=r"clip_max_length=13 is over the 12 positions"):
            clip_encoder(clip, max_length=13)

    def test_keys_of_older_versions(self, clip, copied):
        folder = copied(clip)
        weights = load_file(folder / "model.safetensors")
        older = {key: tensor for key, tensor in weights.items() if key.startswith("text_model.")}
        assert len(older) > 30
        save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
        assert torch.equal(clip_encoder(folder).encode(["sea"]), clip_encoder(clip).encode(["sea"]))


class TestIncompleteFolders:
    def test_missing_folder_names_all_files(self, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            t5(tmp_path / "none")
        assert f"{tmp_path / 'none'} does not exist" in caught.value.message
        for name in ("config.json", "model.safetensors", "spiece.model or tokenizer.json"):
            assert str(tmp_path / "none" / name) in caught.value.message

    @pytest.mark.parametrize("content", ["[" * 100_000, "{", "[]", '{"weight_map": {"a": 1}}', '{"weight_map": 1}'])
    def test_an_index_that_is_none(self, t5_words, copied, content):
        folder = copied(t5_words, without=["model.safetensors"])
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=re.escape(str(folder / "model.safetensors.index.json"))):
            missing_files(folder, vocabularies=T5_VOCABULARIES)

    def test_pickled_shards_as_published(self, t5_words, copied):
        folder = copied(t5_words, without=["model.safetensors"])
        state = load_file(t5_words / "model.safetensors")
        names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        shard_of = {key: names[index % 2] for index, key in enumerate(state)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
        assert missing_files(folder, vocabularies=T5_VOCABULARIES) == [str(folder / name) for name in names]
        for name in names:
            torch.save({key: tensor for key, tensor in state.items() if shard_of[key] == name}, folder / name)
        assert missing_files(folder, vocabularies=T5_VOCABULARIES) == []
        assert torch.equal(t5(folder).encode(["a night boat"]), t5(t5_words).encode(["a night boat"]))


def without(name):
    return lambda folder: (folder / name).unlink()


def holding(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def halve(name):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def take_a_small_model(folder):
    save_model(folder, transformers.T5EncoderModel, transformers.T5Config(vocab_size=8, **T5_SIZES))


def take_a_vocabulary_without_words(folder):
    empty = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=empty, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("t5_pieces", without("spiece.model"), r"is incomplete; missing: \S*spiece\.model or tokenizer\.json$"),
        ("t5_pieces", holding("spiece.model", b"<html>not found</html>"), "is no sentencepiece vocabulary"),
        ("t5_words", without("model.safetensors"), r"missing: \S*model\.safetensors$"),
        ("t5_words", halve("config.json"), r"config\.json is broken"),
        ("t5_words", halve("tokenizer.json"), "vocabulary in .* cannot be loaded"),
        ("t5_words", take_a_small_model, "ids up to 19, its model only 8 rows"),
        ("t5_words", take_a_vocabulary_without_words, "has no words"),
        ("clip", lambda folder: save_tokenizer(folder, None), "does not end a text with token 1"),
        ("clip", halve("tokenizer_config.json"), r"tokenizer_config\.json is broken"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(request, copied, name, damage, message):
    folder = copied(request.getfixturevalue(name))
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        (clip_encoder if name == "clip" else t5)(folder)
    assert "\n" not in caught.value.message
    assert str(folder) in caught.value.message


def test_loading_makes_no_request_and_prints_nothing(t5_pieces, clip, monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise AssertionError("a request to a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    t5(t5_pieces).encode(["a night boat"])
    clip_encoder(clip).encode(["a night boat"])
    assert capfd.readouterr() == ("", "")
