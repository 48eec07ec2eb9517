"""Frozen encoders: layers of T5 in another dtype stay mapped and are cast at use."""

import pytest
import tiny_frozen
import tiny_training
import torch
from mapped_memory import are_mapped, needs_maps
from safetensors.torch import load_file, save_file

from opensora_cli.engine.encode import clips
from opensora_cli.engine.encode.clips import load_encoders

CPU = torch.device("cpu")
CAPTION = "a boat on the sea"


@needs_maps
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_mapped_layers_give_the_embeddings_of_cast_ones(stored, tmp_path, monkeypatch):
    weights = tiny_frozen.save_frozen_parts(tmp_path)
    file = weights / "t5" / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    settings, loaded = tiny_training.mmdit_settings("unused", weights), []

    def load_t5(*args, **options):
        loaded.append(plain_load_t5(*args, **options))
        return loaded[-1]

    plain_load_t5 = clips.load_t5
    monkeypatch.setattr(clips, "load_t5", load_t5)
    encoders = load_encoders(settings, device=CPU)
    whole = plain_load_t5(weights / "t5", max_length=settings.text.t5_max_length, device=CPU, dtype=torch.float32)
    for _ in range(2):
        assert torch.equal(encoders.prompt_embeds(CAPTION), whole.encode([CAPTION])[0])
        [t5] = loaded
        assert are_mapped(t5.blocks.parameters(), file)
        assert {weight.dtype for weight in t5.blocks.parameters()} == {stored}
