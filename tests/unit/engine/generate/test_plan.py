"""Plans of the released presets without their weights, and what does not fit."""

import json
import re
import shutil

import pytest
import torch
import transformers
from shared_models import plan_without_estimate
from tiny_world import dc_ae_settings, demo_settings, released_settings

from opensora_cli.checkpoint.writing import write_weights
from opensora_cli.core.device import GIB
from opensora_cli.core.exceptions import CheckpointError, HardwareError
from opensora_cli.engine.components import architectures, hardware
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.generate import chain as chains
from opensora_cli.engine.generate.chain import alone, make_chain, require_fit
from opensora_cli.engine.generate.dry_run import PlanDocument
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.registry import ARCHITECTURES, OPEN_SORA_V2, Architecture, TextInputs, WeightNames
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.vae.config import HunyuanVAEConfig
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, load_generate_settings

H200 = Hardware(torch.device("cuda", 0), "a large GPU", torch.bfloat16, 139 * GIB, 141 * GIB)


@pytest.fixture
def large_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "pick_hardware", lambda device, dtype: H200)


def released_preset(tmp_path, **changes):
    overrides = {"prompt": "raining, sea", "runtime.weights": str(tmp_path / "none"), **changes}
    given = {key: Given(value, "the test") for key, value in overrides.items()}
    return load_generate_settings(GenerateRequest(overrides=given), model=OPEN_SORA_V2)


@pytest.mark.usefixtures("large_gpu")
def test_compiled_blocks_compute_all_tokens_at_once(tmp_path):
    compiled = plan_without_estimate(released_preset(tmp_path, compile="true"))
    assert compiled.offload.chunk_tokens == compiled.video_tokens + 512 == 8828
    plain = plan_without_estimate(released_preset(tmp_path))
    assert plain.offload.chunk_tokens == 8192


@pytest.mark.usefixtures("large_gpu")
@pytest.mark.parametrize(
    ("resolution", "size", "latent_shape", "tokens"),
    [
        ("256px", (192, 336), (16, 33, 24, 42), 33 * 12 * 21),
        pytest.param("768px", (576, 1024), (16, 33, 72, 128), 33 * 36 * 64, marks=pytest.mark.slow),
    ],
)
def test_released_presets_without_weights(tmp_path, resolution, size, latent_shape, tokens):
    made = make_plan(released_preset(tmp_path, **{"video.resolution": resolution}))
    assert (made.height, made.width) == size
    assert made.latent_shape == latent_shape
    assert made.video_tokens == tokens
    assert made.model_evaluations == 80
    assert len(made.timesteps) == 51
    assert alone(made).fits
    weight_bytes = {stage.name: stage.weight_bytes for stage in made.stages}
    assert weight_bytes["denoise"] == 2 * 11_891_390_528
    assert weight_bytes["decode"] == 2 * 246_478_803
    assert weight_bytes["text"] == 2 * (4_762_310_656 + 123_060_480)
    assert alone(made).peak_bytes == max(stage.total_bytes for stage in made.stages)
    assert made.offload.lines() == []
    activation_bytes = {stage.name: stage.activation_bytes for stage in made.stages}
    assert min(activation_bytes.values()) > 0
    # Tokens, queries, keys, values and what attention gives are there together, each 3072 wide and of 2 bytes.
    assert activation_bytes["denoise"] > 5 * (tokens + 512) * 3072 * 2
    assert made.latent_bytes == 2 * torch.Size(latent_shape).numel()
    document = PlanDocument.of(alone(made))
    assert "Open_Sora_v2.safetensors" in made.missing_weights
    assert "missing   Open_Sora_v2.safetensors" in document.lines()


@pytest.mark.parametrize("resolution", ["256px", pytest.param("768px", marks=pytest.mark.slow)])
def test_on_24_gb_the_released_transformer_is_whole_but_for_its_modulation(tmp_path, monkeypatch, resolution):
    small = Hardware(torch.device("cuda", 0), "a small GPU", torch.bfloat16, 23 * GIB, 24 * GIB)
    monkeypatch.setattr(hardware, "pick_hardware", lambda device, dtype: small)
    made = make_plan(released_preset(tmp_path, **{"video.resolution": resolution}))
    assert alone(made).fits
    assert made.offload.mode == "model"
    assert made.offload.modulation_on_host
    [denoise] = [stage for stage in made.stages if stage.name == "denoise"]
    assert denoise.weight_bytes == 2 * (11_891_390_528 - 3_247_448_064)
    assert "modulation on the host, computed before the first step" in "\n".join(PlanDocument.of(alone(made)).lines())


@pytest.mark.usefixtures("without_estimates")
def test_a_transformer_that_was_trained_on_latents_of_another_scale_is_refused(world, tmp_path):
    path = tmp_path / "trained.safetensors"
    settings = dc_ae_settings(world, tmp_path, files__transformer=str(path))
    trained_with = settings.replace({"vae.dc_ae.scaling_factor": 0.493}).vae
    metadata = architectures.scale_metadata(trained_with)
    write_weights(path, {"any": torch.zeros(1)}, dtype=torch.float32, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"scaling_factor=0\.493, and the settings have .*=none") as caught:
        make_plan(settings)
    assert caught.value.hint == "use --set vae.dc_ae.scaling_factor=0.493"
    architectures.require_same_scale(path, trained_with)


RELEASED = {Component.T5: T5Sizes(), Component.CLIP: ClipSizes()}


def test_constants_of_the_released_text_encoders():
    """The sizes of google/t5-v1_1-xxl and openai/clip-vit-large-patch14, as their config.json have them."""
    t5 = transformers.T5Config(
        d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    clip = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    with torch.device("meta"):
        models = {Component.T5: transformers.T5EncoderModel(t5), Component.CLIP: transformers.CLIPTextModel(clip)}
    for component, model in models.items():
        assert RELEASED[component].parameters == sum(p.numel() for p in model.parameters())


def test_weight_bytes_are_those_of_the_files(world, tmp_path):
    made = make_plan(released_settings(world, tmp_path))
    counts = architectures.count_parameters(made.settings, made.weights)
    assert made.weights.complete
    for component, name in ((Component.TRANSFORMER, "Open_Sora_v2"), (Component.VAE, "hunyuan_vae")):
        size = (world.released / f"{name}.safetensors").stat().st_size
        item = 2 if component is Component.TRANSFORMER else 4
        assert 0 < size - counts[component] * item < 0.9 * size  # a header, and nothing else
    t5 = transformers.T5EncoderModel.from_pretrained(world.released / "google/t5-v1_1-xxl")
    assert counts[Component.T5] == sum(p.numel() for p in t5.parameters())


def on_machine_with(free_bytes, monkeypatch, dtype=torch.float32):
    small = Hardware(torch.device("cpu"), "a small machine", dtype, free_bytes, GIB)
    monkeypatch.setattr(hardware, "pick_hardware", lambda device, dtype: small)


# Its transformer outweighs all else, so that offloading matters.
HEAVY = {"model__depth_single_blocks": "12"}


def test_limit_of_memory(world, tmp_path, monkeypatch):
    on_machine_with(10 * GIB, monkeypatch)
    # It takes seconds, and has tests of its own.
    monkeypatch.setattr(chains, "_smaller_requests", lambda plan: ())
    made = make_plan(released_settings(world, tmp_path, memory__limit="100kB", memory__offload="none"))
    assert made.budget_bytes == 100_000
    with pytest.raises(HardwareError, match=r"memory\.limit allows 97\.66 KiB"):
        require_fit(alone(made))
    assert PlanDocument.of(alone(made)).lines()[0].startswith("Does not fit: ")
    assert (
        make_plan(released_settings(world, tmp_path, memory__limit="20GB", memory__offload="none")).budget_bytes
        == 10 * GIB
    )


def test_what_fits_is_chosen(world, tmp_path, monkeypatch):
    on_machine_with(GIB, monkeypatch)
    assert make_plan(released_settings(world, tmp_path, **HEAVY)).offload == OffloadPlan(
        host_weights="mapped", modulation_on_host=True
    )
    on_machine_with(600_000, monkeypatch)
    made = make_plan(released_settings(world, tmp_path, **HEAVY))
    assert alone(made).fits
    assert made.offload.mode == "blocks"
    assert made.offload.host_weights == "mapped"
    assert 1 < made.offload.resident_blocks < 13
    document = json.loads(json.dumps(PlanDocument.of(alone(made)).to_json()))
    assert document["jobs"][0]["offload"]["resident_blocks"] == made.offload.resident_blocks
    assert f"on the device: {made.offload.resident_blocks}, the others mapped" in "\n".join(
        PlanDocument.of(alone(made)).lines()
    )


@pytest.mark.slow
def test_what_would_fit_is_named(world, tmp_path, monkeypatch):
    on_machine_with(600_000, monkeypatch)
    made = make_plan(released_settings(world, tmp_path, memory__offload="none", **HEAVY))
    with pytest.raises(HardwareError, match="the stage denoise needs") as caught:
        require_fit(alone(made))
    fitting = caught.value.hint
    assert fitting.startswith("--offload auto (")
    assert fitting.endswith(" would fit")
    on_machine_with(20_000, monkeypatch)
    with pytest.raises(HardwareError) as caught:
        require_fit(make_chain(released_settings(world, tmp_path)))
    assert caught.value.hint == "use a device with more memory, or --model demo"


def test_the_longest_shorter_video_that_fits_is_named(world, tmp_path, monkeypatch):
    peaks = {
        frames: make_chain(demo_settings(world, tmp_path, video__num_frames=frames)).peak_bytes for frames in (5, 9, 17)
    }
    assert peaks[5] < peaks[9] < peaks[17]
    on_machine_with(peaks[5], monkeypatch)
    with pytest.raises(HardwareError) as caught:
        require_fit(make_chain(demo_settings(world, tmp_path, video__num_frames=17)))
    assert re.fullmatch(r"--num-frames 5 \([\d.]+ MiB\) would fit", caught.value.hint)
    on_machine_with(1000, monkeypatch)
    with pytest.raises(HardwareError) as caught:
        require_fit(make_chain(demo_settings(world, tmp_path)))
    assert caught.value.hint == "use a device with more memory"


def test_tiles_are_named_where_they_would_fit(world, tmp_path, monkeypatch):
    on_machine_with(GIB, monkeypatch)
    settings = dc_ae_settings(world, tmp_path, video__height="64", video__width="64", vae__spatial_tiling="false")
    whole, tiled = make_plan(settings), make_plan(settings.replace({"vae.spatial_tiling": True}))
    assert alone(tiled).peak_bytes < 0.8 * alone(whole).peak_bytes
    on_machine_with((alone(tiled).peak_bytes + alone(whole).peak_bytes) // 2, monkeypatch)
    with pytest.raises(HardwareError, match="the stage decode needs") as caught:
        require_fit(make_chain(settings))
    assert "--set vae.spatial_tiling=true --set vae.temporal_tiling=true (" in caught.value.hint


def test_decoding_alone_needs_only_the_autoencoder(world, tmp_path):
    made = make_plan(released_settings(world, tmp_path).replace({"from_latents": "x.safetensors"}))
    assert [stage.name for stage in made.stages] == ["decode"]
    assert made.components == (Component.VAE,)
    assert made.model_evaluations == 0


def test_documents(world, tmp_path):
    made = make_plan(demo_settings(world, tmp_path, sampling__num_samples="3"))
    document = json.loads(json.dumps(PlanDocument.of(alone(made)).to_json(), allow_nan=False))
    assert document["schema"] == "osora.plan/7"
    assert document["model_evaluations"] == 3 * made.model_evaluations
    [job] = document["jobs"]
    assert (job["role"], job["missing_weights"], job["height"]) == ("video", [], made.height)
    assert [stage["total_bytes"] for stage in job["stages"]] == [stage.total_bytes for stage in made.stages]
    assert document["settings"]["sampling"]["num_samples"] == 3
    text = "\n".join(PlanDocument.of(alone(made)).lines())
    assert "3 x 64x64, 17 frames" in text
    assert f"{made.video_tokens} video" in text
    assert text.startswith("Fits: ")


def test_tiles_are_counted_as_the_decoder_runs(world, tmp_path):
    released = released_settings(world, tmp_path, vae__temporal_tiling="true")
    for settings, shape in (
        *((released, (4, *size)) for size in ((3, 2, 4), (10, 6, 2), (2, 2, 8))),
        *((dc_ae_settings(world, tmp_path), (8, *size)) for size in ((6, 4, 8), (7, 4, 4), (8, 5, 4), (4, 4, 4))),
    ):
        vae = new_autoencoder(settings.vae)
        runs = []
        vae.decoder.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        with torch.no_grad():
            vae.decode(torch.zeros(1, *shape), tiling=architectures.vae_tiling(settings.vae))
        assert len(runs) == architectures.count_decoder_tiles(shape, settings.vae)
    assert architectures.count_decoder_tiles((4, 10, 8, 8), released.vae) > 1


class TestHardware:
    def test_auto_with_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 7))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        assert hardware.pick_hardware("auto", "auto") == Hardware(
            torch.device("cuda", 0), "a GPU", torch.bfloat16, 3, 7
        )
        assert hardware.pick_hardware("cuda:1", "float32").device == torch.device("cuda", 1)
        with pytest.raises(HardwareError, match="this machine has cuda:0, cuda:1"):
            hardware.pick_hardware("cuda:2", "auto")


@pytest.mark.parametrize("content", ["{", '{"d_model": "wide"}', '{"d_model": -1}'])
def test_a_broken_text_encoder_is_named(world, tmp_path, content):
    weights = shutil.copytree(world.released, tmp_path / "weights")
    (weights / "google/t5-v1_1-xxl/config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json (is broken|does not describe a text encoder): "):
        make_plan(released_settings(world, tmp_path / "out", runtime__weights=str(weights)))


TINY = Architecture(
    transformer=MMDiTConfig(
        in_channels=16, hidden_size=32, num_heads=2, axes_dim=(4, 6, 6), depth=1, depth_single_blocks=1
    ),
    autoencoder=HunyuanVAEConfig(latent_channels=4, block_out_channels=(8, 8, 8, 8), norm_num_groups=4),
    text=TextInputs(t5_max_length=16, clip_max_length=16),
    files=WeightNames(transformer="tiny.safetensors", hub_repo="somebody/tiny"),
    defaults={"video.num_frames": 9, "sampling.num_inference_steps": 3},
)


@pytest.mark.usefixtures("without_estimates")
def test_a_new_entry_of_the_registry_is_planned_with_its_sizes_files_and_sampling(tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny", TINY)
    typed = {"prompt": "sea", "runtime.model_choice": "tiny", "runtime.device": "cpu", "model.depth": 2}
    typed["runtime.weights"] = str(tmp_path)
    request = GenerateRequest(overrides={key: Given(value, "--set") for key, value in typed.items()})
    settings = load_generate_settings(request, model=request.model)
    # A setting overrides a field of the entry.
    assert (settings.model.depth, settings.model.hidden_size) == (2, 32)
    plan = make_plan(settings)
    assert plan.latent_shape[:2] == (4, 3)
    assert plan.num_steps == 3
    assert plan.weights.missing["transformer"] == ("tiny.safetensors",)
