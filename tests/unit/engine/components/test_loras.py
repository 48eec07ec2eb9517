"""Adapters beside the layers of a transformer in a generation."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from adapter_styles import kohya
from closeness import assert_close
from estimated_stages import beside_weights, estimated, measured
from safetensors.torch import load_file, save_file
from storage_sizes import storage_bytes
from tiny_adapters import draw, factors, write_adapter, write_lora
from tiny_transformer import inputs
from tiny_weights import converted
from torch import Tensor

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.ckpt.convert import merge_lora
from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.generate import models
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.sidecar import sample_settings
from opensora_cli.models.linears import LowRankLinear
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.devices import HostWeights, OffloadMode
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.tools import MergeLoraSettings

IN_BLOCKS = r".*_blocks\..*(proj|mlp|linear2|mlp\.\d)"
TRANSFORMER = packaged_demo() / "transformer.safetensors"


def settings_of(*loras: str, **changes: object) -> GenerateSettings:
    settings = load_preset(DEMO, prompt="raining, sea").replace({"runtime.device": "cpu", "loras": loras})
    return settings.replace(changes)


def plan_of(*loras: str, offload: OffloadPlan | None = None, **changes: object) -> Plan:
    plan = make_plan(settings_of(*loras, **changes))
    return plan if offload is None else replace(plan, offload=offload)


@cache
def demo_on_meta() -> MMDiT:
    return transformer_on_meta(settings_of().model)


@pytest.fixture(scope="module")
def style(tmp_path_factory) -> Path:
    """Return an adapter of the layers that osora trains."""
    return write_lora(tmp_path_factory.mktemp("loras") / "style", demo_on_meta(), like=IN_BLOCKS, rank=4)


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    """Return an adapter of all linear layers."""
    return write_lora(tmp_path_factory.mktemp("loras") / "everything", demo_on_meta(), rank=3, seed=1000)


def velocity(plan: Plan) -> Tensor:
    transformer = models.load_transformer(plan)
    given = inputs(transformer, batch=1, tokens=30)
    with torch.inference_mode():
        if plan.offload.mode is OffloadMode.BLOCKS:
            with models.streamed_blocks(plan, transformer):
                return transformer(**given)
        return transformer(**given)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return converted(TRANSFORMER, tmp_path_factory.mktemp("base") / "transformer.safetensors", dtype="fp32")


def merged(base: Path, folder: Path, *adapters: tuple[Path, float]) -> Path:
    for index, (adapter, scale) in enumerate(adapters):
        target = folder / f"{index}" / "transformer.safetensors"
        target.parent.mkdir(parents=True)
        merge_lora(MergeLoraSettings(base=str(base), adapter=str(adapter), target=str(target), scale=scale))
        base = target
    return base.parent


@pytest.mark.usefixtures("without_estimates")
class TestAddLoras:
    @pytest.mark.slow
    def test_one_and_two_equal_the_merged_checkpoint(self, style, everything, base, tmp_path):
        folder = merged(base, tmp_path, (style, 0.8), (everything, -0.5))
        one, both = f"{style}:0.8", f"{everything}/adapter_model.safetensors:-0.5"
        outputs = [velocity(plan_of())]
        for loras, merged_in in (((one,), folder.parent / "0"), ((one, both), folder)):
            outputs.append(velocity(plan_of(*loras)))
            assert_close(outputs[-1], velocity(plan_of(**{"runtime.weights": str(merged_in)})))
            assert (outputs[-1] - outputs[-2]).norm() > 0.01 * outputs[-2].norm()

    @pytest.mark.parametrize(
        "offload",
        [
            pytest.param(
                OffloadPlan(mode=OffloadMode.BLOCKS, resident_blocks=1, host_weights=HostWeights.MAPPED),
                marks=pytest.mark.slow,
            ),
            OffloadPlan(mode=OffloadMode.BLOCKS, resident_blocks=3, host_weights=HostWeights.PINNED, chunk_tokens=7),
        ],
        ids=str,
    )
    def test_offload_changes_no_more_than_rounding(self, everything, offload):
        expected = velocity(plan_of(str(everything)))
        found = velocity(plan_of(str(everything), offload=offload))
        assert_close(found, expected)

    @pytest.mark.parametrize("in_8_bits", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_modulation_before_the_first_step_has_adapters(self, everything, in_8_bits):
        short = {"sampling.num_inference_steps": 2, "sampling.guidance_scale": 1.0, "video.num_frames": 1}
        plan = plan_of(str(everything), **short)
        embeds = PromptEmbeds(
            torch.randn(2, plan.settings.text.t5_max_length, plan.settings.model.context_in_dim),
            torch.randn(2, plan.settings.model.vec_in_dim),
        )
        made = []
        for first in (False, True):
            offload = OffloadPlan(modulation_on_host=first, fp8_storage=in_8_bits)
            chosen = replace(plan, offload=offload)
            with torch.inference_mode():
                made.append(sample_latents(chosen, models.load_transformer(chosen), embeds, None, seed=0))
        assert_close(*made)

    def test_beside_weights_in_8_bits(self, everything):
        offload = OffloadPlan(fp8_storage=True, chunk_tokens=7)
        transformer = models.load_transformer(plan_of(str(everything), offload=offload))
        given = inputs(transformer, batch=1, tokens=30)
        with torch.inference_mode():
            found = transformer(**given)
            # The same sums, as plain weights.
            for path, layer in list(transformer.named_modules()):
                if isinstance(layer, LowRankLinear):
                    plain = torch.nn.Linear(layer.lora_a.shape[1], layer.lora_b.shape[0], bias=layer.bias is not None)
                    plain.load_state_dict(
                        {"weight": layer.weight, **({"bias": layer.bias} if plain.bias is not None else {})}
                    )
                    transformer.set_submodule(path, plain)
            expected = transformer(**given)
        assert_close(found, expected)


@pytest.mark.usefixtures("without_estimates")
class TestOpenLoras:
    @pytest.mark.parametrize(
        ("tensors", "words"),
        [
            (factors("double_blocks.9.img_attn.q_proj", 256, 256), "not in the model: double_blocks"),
            (factors("double_blocks.0.img_attn.q_proj", 256, 255), r"\[256, 256\] \(adapter: A \[2, 255\]"),
            ({name: each * torch.nan for name, each in factors("img_in", 256, 256).items()}, "not finite: base_m"),
        ],
    )
    def test_a_misfit_is_refused_before_weights_are_read(self, tmp_path, tensors, words):
        adapter = write_adapter(tmp_path / "a", tensors)
        with pytest.raises(CheckpointError, match=words):
            make_plan(settings_of(str(adapter), **{"runtime.weights": str(tmp_path)}))

    def test_files_that_are_no_adapters_of_the_model(self, tmp_path):
        with pytest.raises(CheckpointError, match="no folder with an adapter"):
            plan_of(str(tmp_path / "none"))
        with pytest.raises(CheckpointError, match="it is no adapter") as raised:
            plan_of(str(TRANSFORMER))
        assert "--set files.transformer=FILE" in raised.value.hint
        save_file(kohya({"double_blocks.0.img_attn.q": (draw(2, 5), draw(6, 2))}), tmp_path / "a.safetensors")
        with pytest.raises(
            CheckpointError, match="is for 1 weights that are not in the model: lora_unet_double"
        ) as raised:
            plan_of(str(tmp_path / "a.safetensors"))
        assert raised.value.hint.startswith(f"osora ckpt inspect {tmp_path / 'a.safetensors'} lists its tensors")

    def test_paths_and_scales(self, tmp_path, style):
        shutil.copytree(style, tmp_path / "style:new")
        first, second = plan_of(str(tmp_path / "style:new"), f"{tmp_path / 'style:new'}:0.5").loras
        assert (len(first.adapter.updates), first.scale, second.scale) == (56, 1.0, 0.5)
        for scale in ("abc", "nan", ""):
            with pytest.raises(RequestError, match="is not a scale") as raised:
                plan_of(f"{style}:{scale}")
            assert raised.value.hint == "what follows the last colon must be a number, as in :0.8"
        shutil.copytree(style, tmp_path / "run" / "lora")
        of_run, of_folder = plan_of(str(tmp_path / "run"), str(tmp_path / "run" / "lora")).loras
        assert of_run.sha256 == of_folder.sha256


@pytest.mark.usefixtures("without_estimates")
class TestSidecar:
    def again(self, plan: Plan) -> GenerateSettings:
        saved = sample_settings(plan, sample_files(plan.settings, 0)).model_dump(mode="json")
        return GenerateSettings.model_validate(json.loads(json.dumps(saved)))

    def test_path_scale_and_hash_are_kept(self, style, everything, monkeypatch):
        monkeypatch.chdir(style.parent)
        plan = plan_of("style:-0.25", str(everything))
        settings = self.again(plan)
        assert [(file.path, file.scale, file.sha256) for file in settings.loras] == [
            (str(style), -0.25, plan.loras[0].sha256),
            (str(everything), 1.0, plan.loras[1].sha256),
        ]
        assert len(make_plan(settings).loras) == 2

    @pytest.mark.parametrize("changed", ["adapter_model.safetensors", "adapter_config.json"])
    def test_a_changed_adapter_is_refused(self, style, tmp_path, changed):
        copy = Path(shutil.copytree(style, tmp_path / "copy"))
        settings = self.again(plan_of(str(copy)))
        make_plan(settings)
        if changed == "adapter_config.json":
            config = json.loads((copy / changed).read_text())
            (copy / changed).write_text(json.dumps({**config, "lora_alpha": 1}))
        else:
            save_file({name: 2 * tensor for name, tensor in load_file(copy / changed).items()}, copy / changed)
        with pytest.raises(CheckpointError, match="has changed since the run that is repeated") as raised:
            make_plan(settings)
        assert raised.value.hint == f"name it again to use the changed file: --lora {copy}:1"


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 64])
def test_denoising_takes_what_was_estimated(style, everything, tokens):
    loras = (f"{style}:0.8", str(everything))
    plan = plan_of(
        *loras,
        offload=OffloadPlan(chunk_tokens=tokens),
        **{"memory.offload": "none", "sampling.num_inference_steps": 2},
    )
    offload, transformer = OffloadPlan(chunk_tokens=tokens), models.load_transformer(plan)
    stage = estimated(plan, offload)["denoise"]
    assert beside_weights(stage) == pytest.approx(measured(plan, offload, "denoise"), rel=0.1)
    assert stage.weight_bytes == pytest.approx(storage_bytes(transformer.parameters()), rel=0.01)
    alone = estimated(plan_of(**{"memory.offload": "none"}), offload)["denoise"]
    assert stage.weight_bytes > 1.03 * alone.weight_bytes
