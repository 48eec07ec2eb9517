"""From a training of an adapter to a video made with it, on the demo."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_training
import torch
from mapped_memory import are_mapped, needs_maps
from safetensors.torch import load_file, save_file
from tiny_transformer import inputs
from tiny_weights import converted

from opensora_cli.checkpoint.lora import open_adapter
from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.ckpt.convert import merge_lora
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate.models import load_transformer
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.train.build import new_transformer
from opensora_cli.engine.train.memory import streamed_weights, waiting_weights
from opensora_cli.engine.train.plan import plan_training
from opensora_cli.engine.train.run import train
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.tools import MergeLoraSettings
from opensora_cli.settings.train import TrainSettings

DEMO = packaged_demo()
STEPS = 2


def settings_of(output: Path, **changes: object) -> TrainSettings:
    """A few steps of an adapter beside the packaged demo; keys of `changes` have `__` for the dot."""
    given: dict[str, object] = {
        "lora__rank": 2,
        "lora__dropout": 0.25,
        "lora__targets": "q_proj,linear2",
        "data__buckets": "{32px: {5: [1.0, 1]}}",
        "optimizer__decay_steps": 0,
        "loop__steps": STEPS,
    }
    for mode in ("i2v_tail", "i2v_loop", "v2v_head", "v2v_tail", "v2v_head_easy", "v2v_tail_easy"):
        given[f"train_mmdit__mode_weights__{mode}"] = 0
    return tiny_training.demo_settings("demo_lora", output, **{**given, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("lora_run") / "run"
    train(settings_of(output))
    return output


def generating(*loras: Path, weights: Path | None = None):
    changes = {"runtime.device": "cpu", "runtime.dtype": "float32", "loras": tuple(map(str, loras))}
    settings = load_preset("demo", prompt="raining, sea").replace(changes)
    return load_transformer(
        make_plan(settings if weights is None else settings.replace({"runtime.weights": str(weights)}))
    )


@torch.inference_mode()
def velocity(transformer) -> torch.Tensor:
    return transformer(**inputs(transformer, batch=1, tokens=20))


def test_the_adapter_makes_the_video_that_the_merged_model_makes(trained, tmp_path):
    adapter = trained / "lora"
    assert not (trained / "transformer.safetensors").exists()
    base = DEMO / "transformer.safetensors"
    merge_lora(
        MergeLoraSettings(base=str(base), adapter=str(adapter), target=str(tmp_path / "transformer.safetensors"))
    )
    plain, with_adapter, merged = (
        velocity(transformer) for transformer in (generating(), generating(adapter), generating(weights=tmp_path))
    )
    change = (with_adapter - plain).norm()
    assert change > 0.001 * plain.norm()
    # The demo's file has 16 bits, so the merged one is rounded to these.
    assert (with_adapter - merged).norm() < 0.2 * change


def test_the_folder_of_a_run_and_its_last_checkpoint_stand_for_the_adapter(trained):
    whole = velocity(generating(trained / "lora"))
    assert torch.equal(velocity(generating(trained)), whole)
    assert torch.equal(velocity(generating(max(trained.glob("epoch*-global_step*")))), whole)


def test_alpha_of_a_checkpoint_is_that_of_the_settings(trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    checkpoint = max(run.glob("epoch*-global_step*"))
    settings = json.loads((run / "settings.json").read_text())
    for alpha in (None, 3.0):
        settings["lora"]["alpha"] = alpha
        (run / "settings.json").write_text(json.dumps(settings))
        scales = {each.scale for updates in open_adapter(checkpoint).updates.values() for each in updates}
        assert scales == {1.0 if alpha is None else alpha / settings["lora"]["rank"]}
    settings["lora"]["alpha"] = "much"
    (run / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"lora\.alpha. must be a number"):
        open_adapter(checkpoint)
    (run / "settings.json").unlink()
    with pytest.raises(CheckpointError, match=r"settings\.json"):
        open_adapter(checkpoint)


@pytest.mark.slow
def test_streamed_stopped_and_resumed_it_is_the_adapter_of_a_resident_run(trained, tmp_path):
    streamed = {"memory__checkpointing": "full", "memory__offload": "blocks"}
    train(settings_of(tmp_path / "run", loop__steps="1", **streamed))
    train(settings_of(tmp_path / "run", **streamed), resume=True)
    assert tiny_training.losses(tmp_path / "run") == tiny_training.losses(trained)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "run" / "lora" / file).read_bytes() == (trained / "lora" / file).read_bytes()


@needs_maps
def test_frozen_blocks_wait_in_their_file_in_its_dtype(tmp_path):
    streamed = {"memory__checkpointing": "full", "memory__offload": "blocks"}
    settings = settings_of(tmp_path, **streamed)
    plan = plan_training(settings)
    transformer = new_transformer(settings, device=torch.device("cpu"))
    waiting = waiting_weights(transformer, plan.frozen_weights, settings)
    path = DEMO / "transformer.safetensors"
    stored = {str(tensor.dtype) for tensor in load_file(path).values()}
    assert {str(weight.dtype) for weight in waiting} == stored
    assert are_mapped(waiting, path)
    assert plan.frozen_weights.line().startswith("10 frozen blocks, 2 on the device at a time (")
    assert plan.frozen_weights.line() in "\n".join(plan.lines())
    assert plan.frozen_weights.line().endswith("the others mapped (as their file has them)")
    with streamed_weights(
        transformer, plan.frozen_weights, settings, device=torch.device("cpu"), reporter=SilentReporter()
    ) as runs:
        assert sum(run.nbytes for run in runs) == plan.frozen_weights.device_bytes
    assert are_mapped(waiting_weights(transformer, plan.frozen_weights, settings), path)


def test_frozen_weights_in_8_bits_are_those_that_sampling_has(tmp_path):
    settings = settings_of(tmp_path, memory__fp8_storage="true")
    transformer = new_transformer(settings, device=torch.device("cpu"))
    expected = load_preset("demo", prompt="sea").replace(
        {"runtime.device": "cpu", "runtime.dtype": "float32", "memory.fp8_storage": True}
    )
    theirs = load_transformer(make_plan(expected)).state_dict()
    ours = {name.replace(".base_layer.", "."): weight for name, weight in transformer.state_dict().items()}
    assert ours.keys() - theirs.keys() == {name for name in ours if ".lora_" in name}
    assert all(torch.equal(ours[name].float(), weight.float()) for name, weight in theirs.items())
    assert sum(weight.dtype is torch.float8_e4m3fn for weight in ours.values()) == 2 * 14 + 8 * 5


@pytest.mark.slow
def test_an_adapter_goes_on_from_another_as_from_the_model_it_is_merged_into(trained, tmp_path):
    base = converted(DEMO / "transformer.safetensors", tmp_path / "base.safetensors", dtype="fp32")
    merged = tmp_path / "merged.safetensors"
    merge_lora(MergeLoraSettings(base=str(base), adapter=str(trained / "lora"), target=str(merged)))
    runs = {
        "adapter": {"lora__init": str(trained / "lora"), "init": str(base)},
        "merged": {"init": str(merged)},
        "new": {"init": str(base)},
    }
    losses = {}
    for name, changes in runs.items():
        train(settings_of(tmp_path / name, lora__dropout="0", loop__steps="1", **changes))
        losses[name] = tiny_training.losses(tmp_path / name)[0]
    assert losses["adapter"] == pytest.approx(losses["merged"], rel=1e-4)
    assert losses["adapter"] != pytest.approx(losses["new"], rel=1e-4)


def test_the_first_weights_are_those_of_the_file_bit_for_bit(trained, tmp_path):
    tensors = load_file(trained / "lora" / "adapter_model.safetensors")
    kohya = {
        name.removeprefix("base_model.model.").replace(".lora_", "|").replace(".", "_"): tensor
        for name, tensor in tensors.items()
    }
    kohya = {
        "lora_unet_" + name.replace("|A_", ".lora_down.").replace("|B_", ".lora_up."): tensor
        for name, tensor in kohya.items()
    }
    save_file(kohya, tmp_path / "kohya.safetensors")
    for init in (trained / "lora", tmp_path / "kohya.safetensors"):
        settings = settings_of(tmp_path / "run", lora__init=str(init))
        weights = new_transformer(settings, device=torch.device("cpu")).state_dict()
        found = {name: weight for name, weight in weights.items() if ".lora_" in name}
        assert len(found) == len(tensors)
        for name, weight in found.items():
            assert torch.equal(weight, tensors[f"base_model.model.{name.replace('.default.', '.')}"])


@pytest.mark.parametrize(
    ("changes", "words", "hint"),
    [
        ({"lora__rank": "4"}, "it has lora.rank=2, not 4", "--set lora.rank=2"),
        ({"lora__alpha": "8"}, "it has lora.alpha=2, not 8", "--set lora.alpha=2"),
        (
            {"lora__targets": "q_proj"},
            "it has lora.targets=q_proj,linear2, not q_proj",
            "--set lora.targets=q_proj,linear2",
        ),
        (
            {"lora__targets": "q_proj,linear2,mlp", "lora__rank": "3", "lora__alpha": "3"},
            "it has lora.targets=q_proj,linear2, not q_proj,mlp,linear2",
            "--set lora.rank=2 --set lora.alpha=2 --set lora.targets=q_proj,linear2",
        ),
    ],
)
def test_an_adapter_of_another_form_is_not_continued(trained, tmp_path, changes, words, hint):
    with pytest.raises(RequestError) as raised:
        plan_training(settings_of(tmp_path, lora__init=str(trained / "lora"), **changes))
    assert words in raised.value.message
    assert (raised.value.exit_code, raised.value.hint) == (2, hint)
