"""Training adapters, and the files that they are saved in."""

import sys
from pathlib import Path

import peft
import pytest
import torch
from closeness import assert_close
from pydantic import ValidationError
from tiny_transformer import inputs, loss_of, transformer

from opensora_cli.checkpoint.formats.peft import require_peft
from opensora_cli.checkpoint.lazy import LazyTensor
from opensora_cli.checkpoint.lora import merge, open_adapter
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.train.lora import add_lora, save_lora
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.components import LoraFile
from opensora_cli.settings.train_sections import LoraSettings

RANK_4 = LoraSettings(rank=4, alpha=2.0)


def learn(model: MMDiT, *, steps: int = 2) -> None:
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, inputs(model, seed=step)).backward()
        optimizer.step()


def saved(model: MMDiT, folder: Path, settings: LoraSettings = RANK_4) -> Path:
    save_lora(folder, model.state_dict(), config=model.config, settings=settings, base="base.safetensors", metadata={})
    return folder


@torch.no_grad()
def velocity(model: torch.nn.Module, like: MMDiT) -> torch.Tensor:
    return model(**inputs(like, seed=5))


class TestAddLora:
    def test_the_layers_of_the_blocks_and_nothing_else(self):
        model = transformer()
        paths = [
            f"{s.module_path}.{i}.{linear.path}"
            for s in repeated_blocks(model.config)
            for i in range(s.count)
            for linear in s.linears
        ]
        assert len(paths) == 2 * 12 + 3 * 4
        frozen = {name: weight.clone() for name, weight in model.named_parameters()}
        add_lora(model, RANK_4, seed=0)
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert trained == {f"{path}.lora_{letter}.default.weight" for path in paths for letter in "AB"}
        for name, weight in model.named_parameters():
            if name not in trained:
                assert torch.equal(weight, frozen[name.replace(".base_layer.", ".")])

    def test_it_changes_nothing_at_first_and_depends_on_the_seed_alone(self):
        plain, models = transformer(), [transformer(), transformer()]
        for model, noise in zip(models, (1, 2), strict=True):
            torch.manual_seed(noise)
            add_lora(model, RANK_4, seed=7)
            assert torch.equal(velocity(model, plain), velocity(plain, plain))
        first, second = (dict(model.named_parameters()) for model in models)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(weight.any() for name, weight in first.items() if "lora_A" in name)

    def test_without_peft(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "peft", None)
        with pytest.raises(HardwareError, match=r"lora\.rank needs PEFT") as raised:
            require_peft()
        assert raised.value.exit_code == 4
        assert raised.value.hint == "in osora's checkout: pip install -c constraints.txt '.[train]'"


class TestSaveLora:
    def test_merging_it_gives_the_trained_model(self, tmp_path):
        model, plain = transformer(), transformer()
        add_lora(model, RANK_4, seed=0)
        learn(model)
        adapter = open_adapter(saved(model, tmp_path / "adapter"))
        entries = {name: LazyTensor.of(weight) for name, weight in plain.state_dict().items()}
        plain.load_state_dict({name: entry.read() for name, entry in merge(entries, adapter).items()})
        expected = velocity(model, plain)
        assert not torch.allclose(expected, velocity(transformer(), plain), atol=1e-3)
        assert_close(velocity(plain, plain), expected)

    def test_peft_reads_it(self, tmp_path):
        model, plain = transformer(), transformer()
        add_lora(model, RANK_4, seed=0)
        learn(model)
        expected = velocity(model, plain)
        read = peft.PeftModel.from_pretrained(transformer(), str(saved(model, tmp_path / "adapter")))
        assert_close(velocity(read, plain), expected)


class TestLoraFile:
    @pytest.mark.parametrize(
        ("text", "path", "scale"),
        [
            ("style", "style", 1.0),
            ("runs/style.safetensors:0.8", "runs/style.safetensors", 0.8),
            ("style:-1", "style", -1.0),
            ("style:+.5e1", "style", 5.0),
            (r"C:\loras\style", r"C:\loras\style", 1.0),
            ("a:b/style", "a:b/style", 1.0),
            ("a:2:1", "a:2", 1.0),
            (" style:nan ", "style:nan", 1.0),
            (":2", ":2", 1.0),
        ],
    )
    def test_texts(self, text, path, scale):
        file = LoraFile.model_validate(text)
        assert (file.path, file.scale, file.sha256) == (path, scale, None)

    def test_bounds(self):
        with pytest.raises(ValidationError, match="less than or equal to 100"):
            LoraFile.model_validate("style:1e3")
