"""The reference implementation's `.py` configurations as settings of `osora train`."""

from pathlib import Path

import pytest

from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import FileProblem
from opensora_cli.settings.explain import Given
from opensora_cli.settings.python_config import read_python_config
from opensora_cli.settings.reference_training import read_reference_training
from opensora_cli.settings.train import load_train_settings

BASE = '''"""Any description."""
dataset = dict(type="video_text", transform_name="resize_crop", fps_max=16, vmaf=True)
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
warmup_steps = 3
grad_clip = 0.5
use_cosine_scheduler = True
sigma_min = 1e-4
load = "outputs/epoch0"
accumulation_steps = 1
ema_decay = None
num_workers = 5
prefetch_factor = 4
dtype = "fp16"
plugin = "zero2"
plugin_config = dict(reduce_bucket_size_in_m=128)
grad_checkpoint = True
pin_memory_cache_pre_alloc_numels = [(260 + 20) * 1024 * 1024] * 24 + [-1] * 4
seed = 7
outputs = "out"
epochs = 1000
log_every = 11
ckpt_every = 12
keep_n_latest = 13
'''
CHANGED = """_base_ = ["base.py"]
bucket_config = {"_delete_": True, "256px": {33: (0.25, 2)}}
model = dict(cond_embed=True)
condition_config = dict(t2v=1, i2v_head=5)
optim = dict(lr=5e-5)
grad_ckpt_buffer_size = 2 * 1024**3
plugin = "hybrid"
plugin_config = dict(_delete_=True, tp_size=2, pp_size=1, sp_size=4, zero_stage=2,
                     sequence_parallelism_mode="ring_attn")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.py").write_text(BASE)
    (tmp_path / "changed.py").write_text(CHANGED)
    return tmp_path


def loaded(path: Path, **overrides: str):
    lines: list[str] = []
    overrides = {"data.table": "clips.csv", **overrides}
    given = {key: Given(value, "the test") for key, value in overrides.items()}
    return load_train_settings(config=path, overrides=given, environment={}, report=lines.append), lines


def test_everything_that_has_a_place_is_carried_over(folder: Path) -> None:
    settings, lines = loaded(folder / "base.py")
    assert settings.target == "mmdit"
    assert settings.data.fps_max == 16
    assert (settings.data.workers, settings.data.prefetch) == (5, 4)
    assert settings.data.buckets == {"256px": {1: (1.0, 4)}, "1024px": {1: (0.5, 1)}}
    model = settings.model
    assert (model.hidden_size, model.num_heads, model.depth, model.axes_dim) == (96, 4, 3, (8, 8, 8))
    assert (model.cond_embed, model.guidance_embed, model.patch_size) == (False, False, 2)
    assert settings.train_mmdit.mode_weights.by_mode() == {"t2v": 1}
    assert (settings.train_mmdit.t5_dropout, settings.train_mmdit.clip_dropout) == (0.25, 0.5)
    assert settings.weights == ("ckpts",)
    assert settings.train_mmdit.files.model_dump() == {
        "vae": "hunyuan_vae.safetensors",
        "t5": "google/t5-v1_1-xxl",
        "clip": "openai/clip-vit-large-patch14",
    }
    assert (settings.text.t5_max_length, settings.text.clip_max_length) == (256, 77)
    optimizer = settings.optimizer
    assert (optimizer.learning_rate, optimizer.eps, optimizer.beta1, optimizer.beta2) == (2e-5, 1e-15, 0.9, 0.999)
    assert (optimizer.warmup_steps, optimizer.max_grad_norm, optimizer.weight_decay) == (3, 0.5, 0)
    assert (optimizer.schedule, settings.train_mmdit.sigma_min) == ("cosine", 1e-4)
    assert settings.precision.compute == "fp16"
    assert settings.strategy == "zero2"
    memory = settings.memory
    assert (memory.checkpointing, memory.checkpoint_double_blocks, memory.checkpoint_single_blocks) == (True, 2, None)
    loop = settings.loop
    assert (loop.seed, loop.log_every, loop.ema_decay) == (7, 11, None)
    assert (settings.checkpoints.every, settings.checkpoints.keep, settings.output) == (12, 13, "out")
    named = [line.split("not carried over: ")[1].split("=")[0] for line in lines]
    assert named == [
        *("dataset.vmaf", "model.strict_load", "model.fused_qkv", "is_causal_vae", "t5.shardformer"),
        "load",
        *("plugin_config.reduce_bucket_size_in_m", "pin_memory_cache_pre_alloc_numels", "epochs"),
    ]


def test_a_file_changes_its_base(folder: Path) -> None:
    settings, lines = loaded(folder / "changed.py", **{"parallel.gpus": "8"})
    assert settings.data.buckets == {"256px": {33: (0.25, 2)}}
    assert settings.model.cond_embed
    assert settings.train_mmdit.mode_weights.by_mode() == {"t2v": 1, "i2v_head": 5}
    assert settings.optimizer.learning_rate == 5e-5
    assert settings.optimizer.eps == 1e-15
    assert (settings.memory.activation_offload, settings.memory.activation_buffer) == ("all", 2 * 2**30)
    assert settings.strategy == "hybrid"
    assert (settings.parallel.tensor_parallel_degree, settings.parallel.ring_degree) == (2, 4)
    assert not any("plugin" in line for line in lines)


@pytest.mark.parametrize(
    ("plugin", "config", "strategy", "degrees"),
    [
        ("zero1", {}, "zero1", {}),
        ("hybrid", {"tp_size": 1, "sp_size": 1, "zero_stage": 2}, "zero2", {}),
        ("hybrid", {"tp_size": 1, "sp_size": 1, "zero_stage": 0}, "ddp", {}),
        ("hybrid", {"tp_size": 2, "sp_size": 1}, "hybrid", {"tensor_parallel_degree": 2}),
        ("hybrid", {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"}, "hybrid", {"ulysses_degree": 2}),
    ],
)
def test_plugins(folder: Path, plugin: str, config: dict[str, object], strategy: str, degrees: dict[str, int]) -> None:
    path = folder / "own.py"
    path.write_text(f"_base_ = 'base.py'\nplugin = {plugin!r}\nplugin_config = {config!r}\n")
    settings, _ = loaded(path, **{"parallel.gpus": "2"})
    assert settings.strategy == strategy
    assert settings.parallel.degrees == degrees


def test_an_autoencoder(tmp_path: Path) -> None:
    (tmp_path / "ae.py").write_text(
        "model = dict(type='dc_ae', model_name='dc-ae-f32t4c128', from_scratch=True, from_pretrained=None)\n"
        "bucket_config = {'256px_ar1:1': {32: (1.0, 1)}}\n"
        "optim = dict(cls='HybridAdam', lr=5e-5, eps=1e-8, betas=(0.9, 0.98))\n"
        "lr_scheduler = dict(warmup_steps=0)\n"
        "mixed_strategy = 'mixed_video_image'\nmixed_image_ratio = 0.2\n"
        "plugin = 'zero2'\ngrad_checkpoint = False\n"
        "vae_loss_config = dict(perceptual_loss_weight=0.5, kl_loss_weight=0)\n"
        "discriminator = dict(type='N_Layer_discriminator_3D', n_layers=5)\n"
        "gen_loss_config = dict(gen_start=10, disc_factor=1, disc_weight=0.05)\n"
        "disc_loss_config = dict(disc_start=10, disc_factor=1.0, disc_loss_type='hinge')\n"
        "optim_discriminator = dict(cls='HybridAdam', lr=1e-4, eps=1e-8, betas=(0.9, 0.98))\n"
    )
    settings, lines = loaded(tmp_path / "ae.py")
    assert (settings.target, settings.vae.kind, settings.strategy) == ("vae", "dc_ae", "ddp")
    assert settings.data.buckets == {"256px": {32: (1.0, 1)}}
    objective = settings.train_vae
    assert (objective.single_frame_share, objective.perceptual_weight, objective.kl_weight) == (0.2, 0.5, 0)
    against = objective.discriminator
    assert (against.layers, against.weight, against.start_step, against.learning_rate) == (5, 0.05, 10, 1e-4)
    assert settings.optimizer.beta2 == 0.98
    assert [line.split("not carried over: ")[1] for line in lines] == [
        "bucket_config.256px_ar1:1: clips of all aspect ratios are taken, not of 1:1 alone",
        "plugin=zero2: autoencoders are small, and trained with strategy=ddp",
    ]


def test_an_autoencoder_that_would_be_trained_otherwise(tmp_path: Path) -> None:
    (tmp_path / "ae.py").write_text(
        "model = dict(type='dc_ae')\nbucket_config = {'256px': {32: (1.0, 1)}}\n"
        "vae_loss_config = dict(kl_loss_weight=0)\n"
        "grad_checkpoint = True\nlr_scheduler = dict(warmup_steps=9)\ndisc_lr_scheduler = dict(warmup_steps=0)\n"
    )
    settings, lines = loaded(tmp_path / "ae.py")
    assert settings.optimizer.warmup_steps == 9
    assert [line.split("not carried over: ")[1] for line in lines] == [
        "grad_checkpoint=True: is for the transformer's blocks",
        "disc_lr_scheduler.warmup_steps=0: the discriminator's rate rises and falls with the autoencoder's",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "seed = __import__('os').getpid()",
        "seed = open('/etc/passwd').read()",
        "seed = [x for x in range(3)]",
        "model = dict(**{'a': 1})",
        "model['a'] = 1",
        "seed = unknown",
        "def f(): pass",
        "seed = f'{1}'",
    ],
)
def test_nothing_is_executed(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(f"outputs = 'out'\n{line}\n")
    with pytest.raises(FileProblem, match=r"line 2: .* is no data"):
        read_python_config(tmp_path / "a.py")


@pytest.mark.parametrize(
    "line",
    ["a = 9 ** 9 ** 9", "a = [0] * 10 ** 9", "a = 'x' * 10 ** 9", "a = 1 / 0", "a = -'x'", "a = 10**30 * 10**30"],
)
def test_values_that_would_take_all_memory_or_are_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(line)
    with pytest.raises(FileProblem, match="line 1"):
        read_python_config(tmp_path / "a.py")


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for content, message in (
        ("a = (", "is not Python"),
        ("_base_ = 3", "_base_ must be the name of a file"),
        ("_base_ = 'a.py'", "has itself as a base"),
        ("_base_ = 'none.py'", "none.py does not exist"),
        ("a = " + "(" * 5000 + ")" * 5000, "is not Python"),
    ):
        path.write_text(content)
        with pytest.raises(FileProblem, match=message):
            read_python_config(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileProblem, match=r"not text in UTF-8"):
        read_python_config(path)
    path.write_text("ae = dict(type='magvit')")
    with pytest.raises(FileProblem, match=r"ae\.type=magvit is no autoencoder that osora knows"):
        read_reference_training(path)


def test_the_command_lists_what_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("opensora_cli.engine.train.plan.estimate_ranks", lambda settings, *, reporter: ())
    command = ["train", "--config", str(folder / "base.py"), "--dry-run", "--device", "cpu"]
    assert main(command) == 2
    assert "names no table of clips" in capsys.readouterr().err
    assert main([*command, "--set", "data.table=clips.csv"]) == 0
    captured = capsys.readouterr()
    assert "not carried over: dataset.vmaf=True: has no counterpart" in captured.err
    assert "missing     hunyuan_vae.safetensors" in captured.out
