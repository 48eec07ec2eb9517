"""The reference implementation's `.py` configurations for sampling as settings of `osora generate` and `osora vae`."""

from pathlib import Path

import pytest

from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.enums import ModelName
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import GenerateRequest, load_generate_settings, load_preset, load_runtime_settings
from opensora_cli.settings.mem_profile import profiled_settings
from opensora_cli.settings.reference_training import read_reference_training
from opensora_cli.settings.vae_reconstruct import ReconstructSettings, load_vae_settings

BASE = """save_dir = "made"
seed = 42
batch_size = 1
dtype = "bf16"
cond_type = "t2v"
dataset = dict(type="text")
sampling_option = dict(resolution="256px", aspect_ratio="16:9", num_frames=129, num_steps=50, shift=True,
                       temporal_reduction=4, is_causal_vae=True, guidance=7.5, guidance_img=3.0, text_osci=True,
                       image_osci=True, scale_temporal_osci=True, method="i2v", seed=None)
motion_score = "4"
fps_save = 24
model = dict(type="flux", from_pretrained="./ckpts/Open_Sora_v2.safetensors", guidance_embed=False, fused_qkv=False,
             use_liger_rope=True, in_channels=64, vec_in_dim=768, context_in_dim=4096, hidden_size=3072, mlp_ratio=4.0,
             num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10_000, qkv_bias=True,
             cond_embed=True)
ae = dict(type="hunyuan_vae", from_pretrained="./ckpts/hunyuan_vae.safetensors", in_channels=3, out_channels=3,
          layers_per_block=2, latent_channels=16, use_spatial_tiling=True, use_temporal_tiling=False)
t5 = dict(type="text_embedder", from_pretrained="./ckpts/google/t5-v1_1-xxl", max_length=512, shardformer=True)
clip = dict(type="text_embedder", from_pretrained="./ckpts/openai/clip-vit-large-patch14", max_length=77)
"""
SPLIT = """plugin = "hybrid"
plugin_config = dict(tp_size={tensor}, pp_size=1, sp_size={sequence}, sequence_parallelism_mode="ring_attn",
                     enable_sequence_parallelism=True, static_graph=True)
plugin_ae = "hybrid"
plugin_config_ae = dict(tp_size=8, pp_size=1, sp_size=1)
"""
PICTURES_FIRST = """use_t2i2v = True
img_flux = dict(type="flux", from_pretrained="./ckpts/flux1-dev.safetensors", guidance_embed=True)
img_flux_ae = dict(type="autoencoder_2d", from_pretrained="./ckpts/flux1-dev-ae.safetensors")
img_resolution = "768px"
"""
FILES = {
    "256px.py": BASE,
    "plugins/sp.py": SPLIT.format(tensor=1, sequence=8),
    "plugins/tp.py": SPLIT.format(tensor=8, sequence=1),
    "plugins/t2i2v.py": PICTURES_FIRST,
    "768px.py": "_base_ = ['256px.py', 'plugins/sp.py']\nsampling_option = dict(resolution='768px')\n",
    "256px_tp.py": "_base_ = ['256px.py', 'plugins/tp.py']\n",
    "t2i2v_768px.py": "_base_ = ['768px.py', 'plugins/t2i2v.py']\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def loaded(path: Path, **overrides: object):
    """Return the settings, and the lines about what was not carried over."""
    lines: list[str] = []
    given = {key.replace("__", "."): Given(value, "the test") for key, value in overrides.items()}
    request = GenerateRequest(overrides={"prompt": Given("sea", "the test"), **given}, config=path)
    choice = load_runtime_settings(request).model_choice
    settings = load_generate_settings(request, model=ModelName(choice), report=lines.append)
    assert all(line.startswith(f"{path}: not carried over: ") for line in lines)
    return settings, [line.split("not carried over: ")[1] for line in lines]


def own(folder: Path, text: str) -> Path:
    path = folder / "own.py"
    path.write_text(f"_base_ = '256px.py'\n{text}\n")
    return path


@pytest.mark.parametrize("resolution", ["256px", "768px"])
def test_the_published_configurations_are_the_presets(folder: Path, resolution: str) -> None:
    settings, lines = loaded(folder / f"{resolution}.py")
    assert settings == load_preset(resolution, prompt="sea").replace(
        {"output.path": "made", "runtime.dtype": "bfloat16"}
    )
    named = [line.split(": ")[0] for line in lines]
    split = ["plugin_ae, plugin_config_ae"], ["plugin_config.static_graph=True"]
    before, after = split if resolution == "768px" else ([], [])
    assert named == [
        *before,
        *("seed=42", "sampling_option.seed=None", "model.fused_qkv=False", "model.use_liger_rope=True"),
        "t5.shardformer=True",
        *after,
    ]


def test_every_value_has_its_place(folder: Path) -> None:
    settings, lines = loaded(
        own(
            folder,
            "dtype = 'fp16'\ncond_type = 'i2v_head'\nref = 'a.png;b.png'\nref = 'a.png'\nfps_save = 16\n"
            "motion_score = 7\nnum_sample = 3\n"
            "sampling_option = dict(num_frames=33, num_steps=5, guidance=2.5, guidance_img=1.5, text_osci=False,"
            " image_osci=False, scale_temporal_osci=False, seed=9, shift=False)\n"
            "t5 = dict(max_length=256)\nae = dict(use_temporal_tiling=True)",
        )
    )
    assert (settings.runtime.dtype, settings.condition.mode, settings.condition.references) == (
        *("float16", "i2v_head"),
        ("a.png",),
    )
    assert (settings.video.fps, settings.video.num_frames, settings.prompt_suffix.motion_score) == (16, 33, 7)
    sampling = settings.sampling
    assert (sampling.num_samples, sampling.num_inference_steps, sampling.seed) == (3, 5, 9)
    assert (sampling.guidance_scale, sampling.image_guidance_scale, sampling.flow_shift) == (2.5, 1.5, 1)
    assert (sampling.text_oscillation, sampling.image_oscillation, sampling.temporal_image_scaling) == (False,) * 3
    assert (settings.text.t5_max_length, settings.vae.temporal_tiling) == (256, True)
    assert not [line for line in lines if line.startswith("sampling_option")]


def test_a_language_model_is_asked_as_there(folder: Path) -> None:
    settings, _ = loaded(own(folder, "prompt_refine = True\nmotion_score = 'dynamic'"))
    assert (settings.refine.prompt, settings.refine.motion_score) == (True, True)


def test_what_is_not_written_is_as_there(folder: Path) -> None:
    path = folder / "bare.py"
    path.write_text(
        "sampling_option = dict(resolution='256px', aspect_ratio='1:1', num_frames=5)\nmodel = dict(type='flux')\n"
    )
    settings, lines = loaded(path)
    assert (settings.video.fps, settings.prompt_suffix.motion_score, settings.model.cond_embed) == (16, None, False)
    assert lines == []


def test_names_that_stand_alone_win(folder: Path) -> None:
    settings, _ = loaded(own(folder, "num_steps = 7\nresolution = '768px'\nckpt_path = '/w/mine.safetensors'"))
    assert (settings.sampling.num_inference_steps, settings.video.resolution) == (7, "768px")
    assert (settings.files.transformer, settings.runtime.weights) == ("mine.safetensors", "/w")
    assert settings.files.vae == "ckpts/hunyuan_vae.safetensors"


def test_a_size_in_pixels(folder: Path) -> None:
    text = "sampling_option = dict(_delete_=True, height=288, width=512, num_frames=5)"
    settings, _ = loaded(own(folder, text))
    assert (settings.video.height, settings.video.width) == (288, 512)
    _, lines = loaded(own(folder, "sampling_option = dict(height=288, width=512)"))
    assert "sampling_option.height=288: resolution and aspect_ratio win over it" in lines


@pytest.mark.parametrize(
    ("name", "gpus", "degrees"),
    [
        ("768px.py", None, {}),
        ("768px.py", 8, {"ring_degree": 8}),
        ("768px.py", 4, {"ring_degree": 4}),
        ("256px_tp.py", 2, {"tensor_parallel_degree": 2}),
        ("256px.py", 8, {}),
    ],
)
def test_a_model_is_split_over_the_devices_that_there_are(
    folder: Path, name: str, gpus: int | None, degrees: dict[str, int]
) -> None:
    given = {} if gpus is None else {"parallel.gpus": gpus}
    settings, lines = loaded(folder / name, **given)
    assert settings.parallel.degrees == degrees
    assert ("plugin_ae, plugin_config_ae: devices share decoding by themselves" in lines) == (name != "256px.py")


def test_a_plugin_alone(folder: Path) -> None:
    request = GenerateRequest(
        overrides={"prompt": Given("sea", "x"), "parallel.devices": Given("0,1,2,3", "--devices")},
        config=folder / "plugins" / "sp.py",
    )
    demo = load_generate_settings(request, model=ModelName.DEMO)
    assert demo.parallel.ring_degree == 4
    assert demo.replace({"parallel": {}}) == load_preset("demo", prompt="sea")


def test_a_picture_first(folder: Path) -> None:
    settings, lines = loaded(folder / "t2i2v_768px.py")
    assert settings.picture == load_preset("t2i2v_768px", prompt="sea").picture
    assert not [line for line in lines if "img_" in line or "t2i2v" in line.partition("not carried over")[2]]
    other = folder / "other.py"
    other.write_text(
        "_base_ = 't2i2v_768px.py'\nimg_resolution = '1024px'\nimg_flux_ae = dict(ch=64)\n"
        "img_flux = dict(depth=2, from_pretrained='/elsewhere/flux.safetensors')\n"
    )
    picture = loaded(other)[0].picture
    assert (picture.resolution, picture.model.depth, picture.vae.flux_ae.ch) == ("1024px", 2, 64)
    assert picture.files.transformer == "/elsewhere/flux.safetensors"
    other.write_text("_base_ = 't2i2v_768px.py'\nuse_t2i2v = False\n")
    settings, lines = loaded(other)
    assert not settings.picture.first
    assert [
        line for line in lines if line.startswith("img_flux, img_flux_ae, img_resolution: no picture is made first")
    ]


HIGH_COMPRESSION = """_base_ = '{base}.py'
patch_size = 1
plugin = None
plugin_config = None
plugin_ae = None
plugin_config_ae = None
model = dict(from_pretrained="./ckpts/Open_Sora_v2_Video_DC_AE.safetensors", in_channels=128, cond_embed=True,
             patch_size=1)
ae = dict(_delete_=True, type="dc_ae", model_name="dc-ae-f32t4c128", from_scratch=True, use_spatial_tiling=True,
          from_pretrained="./ckpts/F32T4C128_AE.safetensors", use_temporal_tiling=True, spatial_tile_size=256,
          temporal_tile_size=32, tile_overlap_factor=0.25)
ae_spatial_compression = 32
sampling_option = dict(num_frames=128{flag})
"""


def test_the_published_configuration_of_high_compression_is_the_preset_but_for_its_causal_flag(folder: Path) -> None:
    path = folder / "high_compression.py"
    path.write_text(HIGH_COMPRESSION.format(base="t2i2v_768px", flag=""))
    settings, lines = loaded(path)
    ours = load_preset("high_compression", prompt="sea").replace({"output.path": "made", "runtime.dtype": "bfloat16"})
    assert settings == ours.replace({"video.causal_lengths": True})
    assert not [
        line for line in lines if line.startswith(("ae", "sampling_option.is", "model.from", "patch", "plugin"))
    ]
    path.write_text(HIGH_COMPRESSION.format(base="256px", flag=", resolution='768px', is_causal_vae=False"))
    assert loaded(path)[0] == ours.replace({"picture.first": False})


def test_files_for_the_other_command(folder: Path) -> None:
    path = folder / "train.py"
    path.write_text("model = dict()\nbucket_config = {}\noptim = dict(lr=1)\n")
    with pytest.raises(FileProblem, match=r"train\.py is not for sampling") as caught:
        load_runtime_settings(GenerateRequest(config=path))
    assert "osora train" in str(caught.value.hint)
    with pytest.raises(FileProblem, match=r"256px\.py is for sampling") as caught:
        read_reference_training(folder / "256px.py")
    assert "osora generate --config" in str(caught.value.hint)


def reconstruct(path: Path, text: str):
    path.write_text(text)
    lines: list[str] = []
    files = {"files": Given(("a.mp4",), "FILE")}
    settings = load_vae_settings(ReconstructSettings, config=path, overrides=files, environment={}, report=lines.append)
    return settings, [line.split("not carried over: ")[1].split("=")[0] for line in lines]


def test_autoencoders(tmp_path: Path) -> None:
    common = (
        "dtype = 'bf16'\nbatch_size = 1\nseed = 42\nsave_dir = 'there'\nplugin = 'zero2'\nnum_workers = 24\n"
        "dataset = dict(type='video_text', data_path='clips.csv')\nbucket_config = {'512px_ar1:1': {97: (1.0, 1)}}\n"
    )
    causal = (
        "model = dict(type='hunyuan_vae', from_pretrained='./ckpts/hunyuan_vae.safetensors', in_channels=3,\n"
        "out_channels=3, layers_per_block=2, latent_channels=16, scale_factor=0.476986, shift_factor=0,\n"
        "use_spatial_tiling=True, use_temporal_tiling=True, time_compression_ratio=4, encoder_add_residual=False)\n"
    )
    settings, left = reconstruct(tmp_path / "a.py", common + causal)
    assert settings.vae.kind == "hunyuan"
    assert (settings.vae.temporal_tiling, settings.clip.num_frames, settings.output.folder) == (True, 97, "there")
    assert (settings.weights.file, settings.runtime.weights) == ("hunyuan_vae.safetensors", None)
    assert (settings.weights.hub_repo, settings.runtime.dtype) == ("hpcai-tech/Open-Sora-v2", "bfloat16")
    named = ["batch_size", "seed", "plugin", "num_workers", "dataset.type", "dataset.data_path"]
    assert left == [*named, "bucket_config.512px_ar1:1"]
    deep = (
        "model = dict(type='dc_ae', model_name='dc-ae-f32t4c128', from_scratch=True, use_spatial_tiling=True,\n"
        "spatial_tile_size=128, temporal_tile_size=32, tile_overlap_factor=0.25)\n"
    )
    settings, _ = reconstruct(tmp_path / "b.py", common + deep)
    assert (settings.vae.kind, settings.vae.dc_ae.spatial_tile_size) == ("dc_ae", 128)
    assert settings.weights.file == "F32T4C128_AE.safetensors"
    flat = (
        "model = dict(type='autoencoder_2d', from_pretrained='/w/flux/ae.safetensors', resolution=256, in_channels=3,\n"
        "ch=128, out_ch=3, ch_mult=[1, 2, 4, 4], num_res_blocks=2, z_channels=16, scale_factor=1.0, shift_factor=0.0)\n"
    )
    settings, left = reconstruct(tmp_path / "c.py", flat)
    assert (settings.vae.flux_ae.scale_factor, settings.vae.flux_ae.shift_factor) == (1, 0)
    assert (settings.weights.file, settings.runtime.weights, left) == ("ae.safetensors", "/w/flux", [])
    other = "model = dict(type='dc_ae', model_name='dc-ae-f128c512-sana-1.0', from_scratch=True)\n"
    assert reconstruct(tmp_path / "d.py", other)[1] == ["model.model_name", "model.from_scratch"]


def test_the_autoencoder_that_a_training_makes(tmp_path: Path) -> None:
    text = "model = dict(type='dc_ae')\nbucket_config = {'256px': {32: (1.0, 1)}}\nvae_loss_config = dict()\n"
    settings, _ = reconstruct(tmp_path / "a.py", f"{text}outputs = 'runs/x'\n")
    assert (settings.vae.kind, settings.runtime.weights, settings.weights.file) == (
        *("dc_ae", "runs/x"),
        "vae.safetensors",
    )


def test_a_file_without_an_autoencoder(folder: Path) -> None:
    with pytest.raises(FileProblem, match=r"256px\.py is not for an autoencoder"):
        load_vae_settings(ReconstructSettings, config=folder / "256px.py", overrides={}, environment={})


def test_the_command_lists_what_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "sea", "--config", str(folder / "t2i2v_768px.py"), "--set", "video.num_frames=5"]
    assert main([*command, "--gpus", "5", "--set", "parallel.ring_degree=3", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "parallel.ring_degree=3 must divide the 5 devices" in error
    listed = [line for line in error.splitlines() if "t2i2v_768px.py: not carried over: " in line]
    assert len(listed) == 7


def test_a_configuration_is_profiled_as_what_it_is_for(folder: Path) -> None:
    profiled = profiled_settings(folder / "768px.py", assignments=(), device=None, environment={})
    assert isinstance(profiled, GenerateRequest)
    assert load_generate_settings(profiled, model=ModelName.OPEN_SORA_V2).video.resolution == "768px"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model = dict(from_pretrained=3)", "model.from_pretrained=3 must be a text"),
        ("ae = dict(type=['dc_ae'])", "ae.type=['dc_ae'] must be a text"),
        (
            "plugin = 'hybrid'\nplugin_config = dict(sp_size='8')",
            "plugin_config.sp_size='8' must be a number from 1 on",
        ),
    ],
)
def test_a_value_of_another_type_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    (tmp_path / "base.py").write_text(BASE)
    config = tmp_path / "own.py"
    config.write_text(f"_base_ = ['base.py']\n{line}\n")
    assert main(["generate", "sea", "--config", str(config), "--dry-run"]) == 3
    assert f"error: {config}: {message}" in capsys.readouterr().err


def test_buckets_of_another_form_say_nothing_about_clips(tmp_path: Path) -> None:
    config = tmp_path / "vae.py"
    config.write_text("model = dict(type='dc_ae', from_pretrained=None)\ndtype = ['bf16']\nbucket_config = None\n")
    settings = load_vae_settings(
        ReconstructSettings, config=config, overrides={"files": Given("a.mp4", "FILES")}, environment={}
    )
    assert settings.clip.num_frames == ReconstructSettings.model_fields["clip"].get_default().num_frames
