"""T5 layer by layer: the states of the whole encoder, from a few layers' memory."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from mapped_memory import are_mapped, needs_maps
from tiny_world import save_t5

import opensora_cli
from opensora_cli.engine.components.architectures import load_t5
from opensora_cli.memory.host_weights import slot_bytes, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks

DEMO = Path(opensora_cli.__file__).parent / "assets" / "demo" / "t5"
TEXTS = ["a boat on the sea , raining", "the sea at night"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A T5 of five layers."""
    folder = tmp_path_factory.mktemp("t5") / "tiny"
    save_t5(folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    transformers.T5EncoderModel(transformers.T5Config(**{**config, "num_layers": 5})).save_pretrained(folder)
    return folder


def load(folder, *, dtype=torch.float32, device="cpu", blocks_on_host=False):
    return load_t5(folder, max_length=16, device=torch.device(device), dtype=dtype, layers_on_host=blocks_on_host)


@pytest.mark.parametrize(
    ("dtype", "source"), [(torch.float32, "pinned"), (torch.bfloat16, "mapped"), (torch.float16, "pinned")]
)
def test_states_are_equal_bit_for_bit(tiny, dtype, source):
    for folder, resident in ((DEMO, 1), (tiny, 2), (tiny, 3)):
        encoder = load(folder, dtype=dtype, blocks_on_host=True)
        expected = load(folder, dtype=dtype).encode(TEXTS)
        sizes = [slot_bytes(layer) for layer in load(folder, dtype=dtype).blocks]
        cast = dtype if dtype is torch.bfloat16 else None
        with stream_blocks([encoder.blocks], device="cpu", resident=resident, source=source, dtype=cast) as figures:
            for _ in range(2):
                assert torch.equal(encoder.encode(TEXTS), expected)
        assert figures.device_bytes == streaming_bytes(sizes, resident=resident) < sum(sizes)
    # The first layer alone has the table of relative positions.
    assert len(sizes) == 5
    assert sizes[0] > sizes[1] == sizes[4]


@needs_maps
def test_only_the_layers_stay_on_the_host(tiny):
    encoder = load(tiny, device="meta", blocks_on_host=True)
    on_host = {name for name, weight in encoder.model.named_parameters() if not weight.is_meta}
    assert on_host == {f"encoder.block.{name}" for name, _ in encoder.blocks.named_parameters()}
    assert len(on_host) == 5 * 9 + 1
    file = tiny / "model.safetensors"
    assert are_mapped(encoder.blocks.parameters(), file)
    with stream_blocks([encoder.blocks], device="cpu", resident=3, source="mapped"):
        assert are_mapped(encoder.blocks.parameters(), file)
    # In another dtype they stay mapped too, and are cast when they are needed.
    assert are_mapped(load(tiny, dtype=torch.bfloat16, blocks_on_host=True).blocks.parameters(), file)
    assert not are_mapped(load(tiny, dtype=torch.float16, blocks_on_host=True).blocks.parameters(), file)
    assert all(weight.is_meta for weight in load(tiny, device="meta").model.parameters())
