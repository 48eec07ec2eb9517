"""The frozen parts as they are loaded: of another dtype, T5's layers stay mapped until they are computed with."""

import pytest
import tiny_frozen
import tiny_training
import torch
from mapped_files import are_mapped, needs_maps
from safetensors.torch import load_file, save_file

from opensora_cli.engine.encode import frozen_parts
from opensora_cli.engine.encode.frozen_parts import load_encoders

CPU = torch.device("cpu")
CAPTION = "a boat on the sea"


@needs_maps
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_captions_are_encoded_by_layers_that_stay_mapped_as_by_those_that_were_cast(stored, tmp_path, monkeypatch):
    weights = tiny_frozen.save_frozen_parts(tmp_path)
    file = weights / "t5" / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    settings, loaded = tiny_training.mmdit_settings("unused", weights), []

    def load_t5(*args, **options):
        loaded.append(frozen_parts_load_t5(*args, **options))
        return loaded[-1]

    frozen_parts_load_t5 = frozen_parts.load_t5
    monkeypatch.setattr(frozen_parts, "load_t5", load_t5)
    encoders = load_encoders(settings, device=CPU)
    whole = frozen_parts_load_t5(
        weights / "t5", max_length=settings.text.t5_max_length, device=CPU, dtype=torch.float32
    )
    for _ in range(2):
        assert torch.equal(encoders.prompt_embeds(CAPTION), whole.encode([CAPTION])[0])
        [t5] = loaded
        assert are_mapped(t5.blocks.parameters(), file)
        assert {weight.dtype for weight in t5.blocks.parameters()} == {stored}
