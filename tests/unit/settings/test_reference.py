"""The reference implementation's `.py` files as settings of `osora generate` and `osora train`."""

from operator import attrgetter
from pathlib import Path

import pytest

from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given, read_settings_file
from opensora_cli.settings.load import generate_request, load_generate_settings, load_preset
from opensora_cli.settings.tools import ReconstructSettings, load_vae_settings
from opensora_cli.settings.train import TrainSettings, load_train_settings

SAMPLING = """save_dir = "made"; seed = 42; batch_size = 1; dtype = "bf16"; cond_type = "t2v"
dataset = dict(type="text")
sampling_option = dict(resolution="256px", aspect_ratio="16:9", num_frames=129, num_steps=50, shift=True,
                       temporal_reduction=4, is_causal_vae=True, guidance=7.5, guidance_img=3.0, text_osci=True,
                       image_osci=True, scale_temporal_osci=True, method="i2v", seed=None)
motion_score = "4"; fps_save = 24
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
plugin_config = dict(tp_size=1, pp_size=1, sp_size=8, sequence_parallelism_mode="ring_attn",
                     enable_sequence_parallelism=True, static_graph=True)
plugin_ae = "hybrid"
plugin_config_ae = dict(tp_size=8, pp_size=1, sp_size=1)
"""
PICTURES_FIRST = """use_t2i2v = True
img_flux = dict(type="flux", from_pretrained="./ckpts/flux1-dev.safetensors", guidance_embed=True)
img_flux_ae = dict(type="autoencoder_2d", from_pretrained="./ckpts/flux1-dev-ae.safetensors")
img_resolution = "768px"
"""
HIGH_COMPRESSION = """_base_ = 't2i2v_768px.py'
patch_size = 1; plugin = None; plugin_config = None; plugin_ae = None; plugin_config_ae = None
model = dict(from_pretrained="./ckpts/Open_Sora_v2_Video_DC_AE.safetensors", in_channels=128, patch_size=1)
ae = dict(_delete_=True, type="dc_ae", model_name="dc-ae-f32t4c128", from_scratch=True, use_spatial_tiling=True,
          from_pretrained="./ckpts/F32T4C128_AE.safetensors", use_temporal_tiling=True, spatial_tile_size=256,
          temporal_tile_size=32, tile_overlap_factor=0.25)
ae_spatial_compression = 32
sampling_option = dict(num_frames=128)
"""
TRAINING = """dataset = dict(type="video_text", transform_name="resize_crop", fps_max=16, vmaf=True)
grad_ckpt_settings = (2, 100)
bucket_config = {"256px": {1: (1.0, 4)}, "1024px": {1: (0.5, 1)}}
model = dict(type="flux", from_pretrained=None, strict_load=False, fused_qkv=False,
             grad_ckpt_settings=grad_ckpt_settings,
             hidden_size=96, num_heads=4, depth=3, depth_single_blocks=5, axes_dim=[8, 8, 8], theta=10_000)
dropout_ratio = {"t5": 0.25, "clip": 0.5}
ae = dict(type="hunyuan_vae", from_pretrained="./ckpts/hunyuan_vae.safetensors", in_channels=3,
          use_temporal_tiling=False)
is_causal_vae = True
t5 = dict(type="text_embedder", from_pretrained="google/t5-v1_1-xxl", max_length=256, shardformer=True)
clip = dict(type="text_embedder", from_pretrained="openai/clip-vit-large-patch14", max_length=77)
lr = 2e-5
optim = dict(cls="HybridAdam", lr=lr, eps=1e-15, weight_decay=0.0, adamw_mode=True)
warmup_steps = 3; grad_clip = 0.5; use_cosine_scheduler = True; sigma_min = 1e-4; accumulation_steps = 1
ema_decay = None; num_workers = 5; prefetch_factor = 4; dtype = "bf16"; grad_checkpoint = True; load = "outputs/epoch0"
plugin = "zero2"; plugin_config = dict(reduce_bucket_size_in_m=128)
seed = 7; outputs = "out"; log_every = 11; ckpt_every = 12; keep_n_latest = 13
"""
FILES = {
    "256px.py": SAMPLING,
    "plugins/sp.py": SPLIT,
    "plugins/t2i2v.py": PICTURES_FIRST,
    "768px.py": "_base_ = ['256px.py', 'plugins/sp.py']\nsampling_option = dict(resolution='768px')\n",
    "t2i2v_768px.py": "_base_ = ['768px.py', 'plugins/t2i2v.py']\n",
    "high_compression.py": HIGH_COMPRESSION,
    "train.py": TRAINING,
}
LISTED = ["seed", "model.fused_qkv", "model.use_liger_rope", "t5.shardformer"]
LISTED_SPLIT = [*LISTED, "plugin", "plugin_config", "plugin_ae", "plugin_config_ae"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugins").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def own(folder: Path, text: str, *, base: str = "256px.py") -> Path:
    path = folder / "own.py"
    path.write_text(f"_base_ = {base!r}\n{text}\n")
    return path


def listed(path: Path, lines: list[str]) -> list[str]:
    assert len(lines) <= 1
    assert all(line.startswith(f"{path}: not carried over: ") for line in lines)
    return [name for line in lines for name in line.split("not carried over: ")[1].split(", ")]


def generation(path: Path) -> tuple[GenerateSettings, list[str]]:
    """Return the settings, and the names that are not carried over."""
    request = generate_request({"prompt": Given("sea", "the test")}, config=path, environment={})
    return load_generate_settings(request, model=request.model), listed(path, list(request.notes))


def training(path: Path) -> tuple[TrainSettings, list[str]]:
    lines: list[str] = []
    given = {"data.table": Given("clips.csv", "the test")}
    settings = load_train_settings(config=path, overrides=given, environment={}, report=lines.append)
    return settings, listed(path, lines)


def wrong(settings: object, expected: str) -> list[str]:
    """Return which of the expected `key=value` are others, as they are."""
    pairs = [pair.split("=", 1)[0] for pair in expected.split()]
    found = [f"{key}={attrgetter(key)(settings)}".replace(" ", "") for key in pairs]
    return [is_there for is_there, pair in zip(found, expected.split(), strict=True) if is_there != pair]


@pytest.mark.parametrize("name", ["256px", "768px", "t2i2v_768px", "high_compression"])
def test_the_published_files_are_the_presets(folder: Path, name: str) -> None:
    settings, left = generation(folder / f"{name}.py")
    same: dict[str, object] = {"output.path": "made", "runtime.dtype": "bfloat16"}
    if name == "high_compression":
        # The reference's own file leaves the flag of the other model on.
        same["video.causal_lengths"] = True
    assert settings == load_preset(name, prompt="sea").replace(same)
    assert left == (LISTED_SPLIT if "768px" in name else LISTED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "dtype = 'fp16'\ncond_type = 'i2v_head'\nref = 'a.png'\nfps_save = 16\nmotion_score = 7\nnum_sample = 3",
            "runtime.dtype=float16 condition.mode=i2v_head condition.references=('a.png',) video.fps=16 "
            "prompt_suffix.motion_score=7 sampling.num_samples=3",
        ),
        (
            "sampling_option = dict(num_frames=33, num_steps=5, guidance=2.5, guidance_img=1.5, text_osci=False,"
            " image_osci=False, scale_temporal_osci=False, seed=9, shift=False)",
            "video.num_frames=33 sampling.num_inference_steps=5 sampling.seed=9 sampling.guidance_scale=2.5 "
            "sampling.image_guidance_scale=1.5 sampling.flow_shift=1.0 sampling.text_oscillation=False "
            "sampling.image_oscillation=False sampling.temporal_image_scaling=False",
        ),
        ("prompt_refine = True\nmotion_score = 'dynamic'", "refine.prompt=True refine.motion_score=True"),
        (
            # A name that stands alone wins.
            "num_steps = 7\nresolution = '768px'\nckpt_path = '/w/mine.safetensors'",
            "sampling.num_inference_steps=7 video.resolution=768px runtime.weights=None "
            "files.transformer=/w/mine.safetensors files.vae=hunyuan_vae.safetensors",
        ),
        (
            "sampling_option = dict(_delete_=True, height=288, width=512, num_frames=5)",
            "video.height=288 video.width=512",
        ),
    ],
    ids=["names", "sampling", "refine", "alone", "pixels"],
)
def test_every_value_of_sampling_has_its_place(folder: Path, text: str, expected: str) -> None:
    settings, left = generation(own(folder, text))
    assert wrong(settings, expected) == []
    assert set(left) <= set(LISTED)


def test_names_without_a_place_are_listed_once_and_whole_sections_by_their_name(folder: Path) -> None:
    text = "lora_config = dict(r=8, alpha=8)\nsampling_option = dict(height=288)\noffload_model = True\nbatch_size = 2"
    assert generation(own(folder, text))[1] == [
        *("seed", "batch_size", "sampling_option.height", *LISTED[1:]),
        "lora_config",
    ]


def test_everything_of_training_that_has_a_place(folder: Path) -> None:
    settings, left = training(folder / "train.py")
    expected = """
        target=mmdit strategy=zero2 precision.compute=bf16 weights=('ckpts',) output=out data.fps_max=16.0
        model.hidden_size=96 model.axes_dim=(8,8,8) model.cond_embed=False train_mmdit.t5_dropout=0.25
        train_mmdit.files.vae=hunyuan_vae.safetensors train_mmdit.files.t5=google/t5-v1_1-xxl text.t5_max_length=256
        optimizer.learning_rate=2e-05 optimizer.beta2=0.999 optimizer.warmup_steps=3 optimizer.schedule=cosine
        memory.checkpointing=full loop.seed=7 loop.ema_decay=None checkpoints.every=12
    """
    assert wrong(settings, expected) == []
    assert settings.data.buckets == {"256px": {1: (1.0, 4)}, "1024px": {1: (0.5, 1)}}
    assert settings.train_mmdit.mode_weights.by_mode() == {"t2v": 1}
    names = ["dataset.vmaf", "model.strict_load", "model.fused_qkv", "model.grad_ckpt_settings", "is_causal_vae"]
    assert left == [*names, "t5.shardformer", "load", "plugin_config"]


def test_files_for_another_command(folder: Path) -> None:
    with pytest.raises(FileProblem, match=r"train\.py is not for sampling") as caught:
        generate_request(config=folder / "train.py", environment={})
    assert "osora train" in str(caught.value.hint)
    with pytest.raises(FileProblem, match=r"256px\.py is for sampling") as caught:
        training(folder / "256px.py")
    assert "osora generate --config" in str(caught.value.hint)
    path = own(folder, "vae_loss_config = dict(perceptual_loss_weight=0.5)", base="train.py")
    with pytest.raises(FileProblem, match=r"own\.py trains an autoencoder"):
        training(path)
    with pytest.raises(FileProblem, match=r"256px\.py is not for osora vae"):
        load_vae_settings(ReconstructSettings, config=folder / "256px.py", overrides={}, environment={})


@pytest.mark.parametrize(
    "lines",
    ["optim = dict(_delete_=True, betas=5)", "bucket_config = None", "condition_config = 3", "dtype = ['bf16']"],
)
def test_values_of_another_form_are_no_crash(folder: Path, lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = own(folder, lines, base="train.py")
    assert main(["train", "--config", str(config), "--set", "nope=1"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_commands_list_what_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "sea", "--config", str(folder / "256px.py"), "--set", "video.num_frames=5"]
    assert main([*command, "--gpus", "5", "--set", "parallel.ring_degree=3", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "parallel.ring_degree=3 must divide the 5 devices" in error
    assert f"256px.py: not carried over: {', '.join(LISTED)}\n" in error
    assert main(["train", "--config", str(folder / "train.py"), "--dry-run", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "names no table of clips" in error
    assert "not carried over: dataset.vmaf, model.strict_load, " in error


def test_data_is_read_and_code_is_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        '"""Any description."""\nsize = -10_000\nlong = [0, 0]\n'
        "model = dict(depth=size, axes=[8, 8], rest={'a': None, 1: (True,)})\n"
        "code = dict(a=2 * 2, b=open('/etc/passwd').read(), c=[x for x in (1,)], d=unknown, e=f'{1}', f=9 ** 9 ** 9, "
        "g=long, h=dict(**{'a': 1}), i={**{'a': 1}}, j=dict(k=[__import__('os')]))\n"
    )
    values = read_settings_file(path)
    assert values.pop("code") == {**dict.fromkeys("abcdefghi", ...), "j": {"k": ...}}
    model = {"depth": -10_000, "axes": [8, 8], "rest": {"a": None, 1: (True,)}}
    assert values == {"size": -10_000, "long": [0, 0], "model": model}


def test_code_is_refused_where_it_would_be_carried_over(folder: Path) -> None:
    assert "lora_config" in generation(own(folder, "lora_config = dict(r=2 * 8)"))[1]
    with pytest.raises(FileProblem, match=r"own\.py: sampling_option\.num_steps is not a plain value") as caught:
        generation(own(folder, "sampling_option = dict(num_steps=2 * 8)"))
    assert "write the value itself" in str(caught.value.hint)


def test_a_file_changes_its_bases_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = dict(b=1, c=dict(d=2))\nonly = 1\n")
    (tmp_path / "two.py").write_text("a = dict(b=3)\n")
    (tmp_path / "a.py").write_text("_base_ = ['one.py', 'two.py']\na = dict(c=dict(_delete_=True, e=4))\n")
    assert read_settings_file(tmp_path / "a.py") == {"a": {"b": 3, "c": {"e": 4}}, "only": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = (", "is not Python"),
        (b"a = " + b"(" * 5000 + b")" * 5000, "is not Python"),
        (b"a = 1\nimport os", "line 2: it is not NAME = VALUE"),
        (b"a['b'] = 1", "line 1: it is not NAME = VALUE"),
        (b"def f(): pass", "line 1: it is not NAME = VALUE"),
        (b"_base_ = 3", "_base_ must be the name of a file"),
        (b"_base_ = 'a.py'", "a.py extends itself: a.py -> a.py"),
        (b"_base_ = 'none.py'", "none.py does not exist"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.py").write_bytes(content)
    with pytest.raises(FileProblem, match=message):
        read_settings_file(tmp_path / "a.py")
