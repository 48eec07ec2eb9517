"""Outlines against real tensors, and the operations of a plan."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CLIPTextConfig, T5Config

from opensora_cli.engine.components.architectures import count_parameters, transformer_on_meta
from opensora_cli.engine.estimate import autoencoder, generation, transformer
from opensora_cli.engine.estimate.fake_tensors import Need, fake_device, fake_module
from opensora_cli.engine.estimate.outlines import HostOutline, OutlineMode
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.layers import tanh_gelu
from opensora_cli.models.text.clip import ClipTextModel
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.models.text.t5 import T5Model
from opensora_cli.settings.load import load_preset

SLOW = pytest.mark.slow
SMALL = {
    "video.num_frames": 9,
    "video.height": 48,
    "video.width": 32,
    "vae.block_out_channels": (8, 16, 32),
    "vae.layers_per_block": 1,
    "vae.norm_num_groups": 4,
}


def operands():
    """Return rows, the same transposed, a number, one of another kind, and indices."""
    rows = torch.empty((2, 3, 4), dtype=torch.bfloat16)
    number, count = torch.empty((), dtype=torch.float32), torch.empty((), dtype=torch.int64)
    return rows, torch.empty((4, 3, 2)).permute(2, 1, 0), number, count, torch.empty((3, 1), dtype=torch.int64)


@pytest.mark.parametrize(
    "operation",
    [
        lambda rows, turned, number, count, ids: number * rows,
        lambda rows, turned, number, count, ids: rows * number,
        lambda rows, turned, number, count, ids: turned + rows,
        lambda rows, turned, number, count, ids: rows - ids,
        lambda rows, turned, number, count, ids: 1.5 * ids,
        lambda rows, turned, number, count, ids: ids / 2,
        lambda rows, turned, number, count, ids: count * number,
        lambda rows, turned, number, count, ids: count * rows,
        lambda rows, turned, number, count, ids: ids << 1,
        lambda rows, turned, number, count, ids: ids.clamp(min=0),
        lambda rows, turned, number, count, ids: turned.exp(),
        lambda rows, turned, number, count, ids: torch.cat((rows, turned), dim=1),
        lambda rows, turned, number, count, ids: torch.stack((rows, rows), dim=-1),
        lambda rows, turned, number, count, ids: rows.repeat(2, 1, 1, 3),
        lambda rows, turned, number, count, ids: rows @ rows.mT,
        lambda rows, turned, number, count, ids: turned.mean(dim=(0, -1), keepdim=True),
        lambda rows, turned, number, count, ids: turned.var(dim=1),
        lambda rows, turned, number, count, ids: rows.sum(dim=-1),
        lambda rows, turned, number, count, ids: ids.sum(dim=0, keepdim=True),
        lambda rows, turned, number, count, ids: torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32),
        lambda rows, turned, number, count, ids: torch.addcmul(number, turned, rows),
        lambda rows, turned, number, count, ids: turned.to(torch.float16),
        lambda rows, turned, number, count, ids: torch.arange(1, 10, 2),
        lambda rows, turned, number, count, ids: torch.arange(2.5),
        lambda rows, turned, number, count, ids: turned > 0,
        lambda rows, turned, number, count, ids: torch.where(rows > 0, rows, number),
        lambda rows, turned, number, count, ids: turned.flip(1),
        lambda rows, turned, number, count, ids: rows.argmax(dim=-1),
        lambda rows, turned, number, count, ids: rows[[0, 1], [1, 0]],
        # Without a rule: torch's own on the meta device.
        lambda rows, turned, number, count, ids: turned.cumsum(dim=1),
    ],
)
def test_an_outline_is_that_of_what_the_operation_gives(operation):
    given = operation(*operands())
    with fake_device("cpu"):
        outline = operation(*operands())
    facts = [(each.shape, each.stride(), each.dtype, each.device) for each in (given, outline)]
    assert facts[0] == facts[1]
    assert isinstance(outline, HostOutline)


T5S = [
    {"d_model": 64, "d_ff": 32, "num_heads": 2, "num_layers": 2, "feed_forward_proj": "gated-gelu"},
    {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "num_layers": 1, "feed_forward_proj": "gated-gelu"},
]
CLIPS = [{"num_hidden_layers": 3}, {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "sizes", "model"),
    [
        *((T5Config(**changes), T5Sizes, T5Model) for changes in T5S),
        *((CLIPTextConfig(**changes), ClipSizes, ClipTextModel) for changes in CLIPS),
    ],
)
def test_a_text_takes_what_is_estimated_from_few_layers(config, sizes, model, dtype, tmp_path):
    config.save_pretrained(tmp_path)
    of_folder = sizes.of(tmp_path)
    encoder = model(of_folder).to(dtype).eval()
    assert of_folder.parameters == sum(weight.numel() for weight in encoder.parameters())
    with torch.inference_mode(), TensorBytes() as counter:
        ids = torch.zeros((1, 16), dtype=torch.int64)
        embeds = encoder(ids)
        del ids
        need = Need.of(counter)
        del embeds
    found = generation._text_need(of_folder, 16, dtype)
    assert found.data == need.data
    assert found.activations == pytest.approx(need.activations, rel=0.05)


def operations(changes, monkeypatch):
    """Return how many operations a plan of the demo runs on outlines."""
    count = 0
    for cached in (
        transformer.sampling_need,
        autoencoder.decoding_need,
        autoencoder._encoding_need,
        generation._text_need,
    ):
        cached.cache_clear()
    dispatch = OutlineMode.__torch_dispatch__

    def counted(mode, func, *args, **options):
        nonlocal count
        count += func is not torch.ops.prim.device.default
        return dispatch(mode, func, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(OutlineMode, "__torch_dispatch__", counted)
        make_plan(load_preset("demo", prompt="any").replace({"runtime.device": "cpu", **SMALL, **changes}))
    return count


@pytest.mark.slow
def test_a_plan_costs_no_more_for_more_blocks_steps_and_ranks(monkeypatch):
    few = operations({}, monkeypatch)
    assert 0 < few < 3000
    more = {"model.depth": 19, "model.depth_single_blocks": 38, "sampling.num_inference_steps": 100}
    # Each time is one number on the device.
    assert few <= operations(more, monkeypatch) < few + 100
    assert operations({"parallel.gpus": 2}, monkeypatch) < 1.3 * few


def test_outlines_are_not_computed_piece_by_piece():
    with fake_device("cpu"), TensorBytes() as counter:
        tanh_gelu(torch.empty(1, 4096, 1024))
    assert len(counter.changes) < 20


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_cudnn_has_clip_and_result_a_second_time():
    for kernel, again in ((3, 1), (1, 0)):
        with fake_device("cuda") as device:
            conv = fake_module(partial(nn.Conv3d, 4, 8, kernel), device=device, dtype=torch.bfloat16)
            clip = torch.empty(1, 4, 5, 6, 7, dtype=torch.bfloat16, device=device)
            with TensorBytes() as counter:
                result = conv(clip)
        assert counter.peak_bytes - counter.live_bytes == again * (clip.nbytes + result.nbytes)


def test_nothing_is_drawn_for_weights_that_are_not_there():
    with Recording() as drawn, torch.device("meta"):
        nn.Linear(3, 4)
    assert "aten::uniform_" in drawn.names
    # Sizes that no other test has planned.
    settings = load_preset("256px", prompt="any").replace({"model.mlp_ratio": 3.5, "vae.sample_size": 320})
    with Recording() as recording:
        make_plan(settings.replace({"runtime.device": "cpu"}))
    assert recording.names
    assert not recording.names & {"aten::uniform_", "aten::normal_", "aten::random_"}


def test_all_parameters_are_counted_from_one_block_of_each_kind():
    settings = load_preset("demo", prompt="any").replace({"model.depth": 3, "model.depth_single_blocks": 2})
    whole = sum(weight.numel() for weight in transformer_on_meta(settings.model).parameters())
    plan = make_plan(settings.replace({"runtime.device": "cpu"}))
    assert count_parameters(settings, plan.weights)["transformer"] == whole


@pytest.mark.slow
def test_a_plan_imports_neither_the_compiler_of_torch_nor_transformers():
    program = (
        "import sys\n"
        "from opensora_cli.engine.generate.plan import make_plan\n"
        "from opensora_cli.settings.load import load_preset\n"
        "for name in ('demo', '256px', 'high_compression'):\n"
        "    make_plan(load_preset(name, prompt='any').replace({'runtime.device': 'cpu'}))\n"
        "print(*({'torch._dynamo', 'sympy', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
