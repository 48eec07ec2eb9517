"""Looking into checkpoints: what is reported, without reading tensors."""

from pathlib import Path

from tiny_adapters import factors, write_adapter
from tiny_weights import write_holes

from opensora_cli.engine.ckpt.identify import read_released
from opensora_cli.engine.ckpt.inspect import Inspection, inspect
from opensora_cli.settings.ckpt import InspectSettings


def look(path: Path, **options: object) -> Inspection:
    return inspect(InspectSettings.model_validate({"path": str(path), **options}))


def test_the_released_model_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_holes(path, read_released("open-sora-v2").shapes, dtype="BF16", metadata={"note": "hello"})
    assert path.stat().st_size > 23 * 10**9
    assert path.stat().st_blocks * 512 < 10**7

    document = look(path).to_json()
    assert document["schema"] == "osora.ckpt.inspect/3"
    assert (document["model"], document["format"]) == ("open-sora-v2", "safetensors")
    assert (document["qkv"], document["rotary"]) == ("split", "half")
    assert document["parameters"] == 11_891_390_528
    assert document["dtypes"] == {"bfloat16": {"tensors": 1082, "parameters": 11_891_390_528, "bytes": 23_782_781_056}}
    assert document["metadata"] == {"note": "hello"}
    first = {"name": "img_in.weight", "dtype": "bfloat16", "shape": [3072, 64], "bytes": 393216}
    assert document["tensors"][0] == first


def test_the_scales_of_an_adapter_are_in_the_summary(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", factors("block.proj", 6, 5, rank=4), r=4, lora_alpha=2)
    assert "adapter     alpha / rank 0.5" in look(folder).lines()
    assert "model       LoRA in the style of PEFT, rank 4 in 1 layers" in look(folder).lines()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    refusal = f"adapter     {folder / 'adapter_config.json'}: an adapter with use_dora cannot be added"
    assert refusal in look(folder / "adapter_model.safetensors").lines()
