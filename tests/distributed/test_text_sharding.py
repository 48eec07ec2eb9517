"""A T5 whose heads and features are divided between real processes against the same in one process."""

from pathlib import Path

import torch
import torch.distributed as dist
from closeness import relative_error
from shared_tokens import mesh_of
from torch import nn

from opensora_cli.engine.components.parallelize import shard_t5
from opensora_cli.models.text.encoders import T5Encoder
from opensora_cli.models.text.sizes import T5Sizes
from opensora_cli.models.text.t5 import T5Model


class _Words:
    """A tokenizer: one token for each letter."""

    def padded_ids(self, texts: list[str], length: int) -> list[list[int]]:
        return [[ord(letter) % 32 for letter in text.ljust(length, "@")] for text in texts]


def _encoder() -> T5Encoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 22, "num_layers": 3, "num_heads": 6}
    model = T5Model(T5Sizes.from_config({**sizes, "feed_forward_proj": "gated-gelu"}, path=Path("t5")))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    return T5Encoder(model=model, tokenizer=_Words(), max_length=40, device="cpu")


def _bytes(modules: nn.Module | list[nn.Module]) -> int:
    return sum(weight.nbytes for weight in modules.parameters())


def _sharded() -> tuple[float, list[int], list[tuple[int, ...]]]:
    """Return the error of the states, bytes of the layers before and after, and the shapes of the first layer."""
    encoder = _encoder()
    texts = ["raining, sea", "a red boat on the sea at night"]
    expected = encoder.encode(texts)
    before = _bytes(encoder.blocks)
    shard_t5(encoder, mesh_of(tensor=dist.get_world_size()).group("tensor"))
    states = encoder.encode(texts)
    assert states.shape == (2, 40, 16)
    shapes = [tuple(weight.shape) for weight in encoder.blocks[0].parameters()]
    return relative_error(states, expected), [before, _bytes(encoder.blocks)], shapes


def test_states_and_bytes(pool):
    answers, heads, features = pool(4).run(_sharded), [2, 2, 1, 1], [6, 6, 5, 5]
    norms, buckets = 2 * 16, 32
    for (error, (before, after), shapes), own_heads, own_features in zip(answers, heads, features, strict=True):
        assert error < 1e-5
        layer = 4 * 16 * 4 * own_heads + 3 * 16 * own_features + norms
        assert after == 4 * (3 * layer + buckets * own_heads)
        assert before > after
        attention = [(4 * own_heads, 16)] * 3 + [(16, 4 * own_heads), (buckets, own_heads)]
        assert sorted(shapes) == sorted([*attention, *[(own_features, 16)] * 2, (16, own_features), (16,), (16,)])
