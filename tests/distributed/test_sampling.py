"""Several ranks draw the video that one draws: the demo, under all conditions and by every way to share its work."""

import sys
from math import prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from adapter_styles import fused_factors, write_styles
from closeness import assert_close
from mapped_memory import NO_FILE, mapped_files
from sent_bytes import counted_bytes
from shared_models import plan_without_estimate
from storage_sizes import storage_bytes
from tiny_adapters import write_lora
from tiny_transformer import inputs
from torch._dynamo.utils import counters

from opensora_cli.cli.app import main
from opensora_cli.core.conditions import reference_parts
from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate import models as loading
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.ranks import ALONE, Ranks
from opensora_cli.models.attention.torch_kernels import sdpa
from opensora_cli.models.linears import LowRankLinear
from opensora_cli.settings.load import load_preset

STEPS = 2


def plan_of(
    mode="t2v",
    degrees=None,
    *,
    frames=17,
    transformer="transformer.safetensors",
    **changes,
):
    references = {"i2v_loop": ("a.png", "b.png")}.get(mode, ("a.png",)) if mode != "t2v" else ()
    degrees = degrees or {}
    # Their six latent frames are 21 of a video.
    frames = max(frames, 25) if mode.endswith("_easy") else frames
    settings = load_preset("demo", prompt="raining, sea").replace(
        {
            "runtime.device": "cpu",
            "files.transformer": transformer,
            "sampling.num_inference_steps": STEPS,
            "video.num_frames": frames,
            "video.max_frames": frames,
            "condition.mode": mode,
            "condition.references": references,
            "parallel.gpus": prod(degrees.values()) if degrees else None,
            **{f"parallel.{axis}_degree": degree for axis, degree in degrees.items()},
            **changes,
        }
    )
    return plan_without_estimate(settings)


def on_this_rank(plan):
    """Return the ranks that share the work, None in one process, and the transformer or this rank's share of it."""
    ranks = Ranks(torch.device("cpu"), plan.mesh) if plan.mesh.size > 1 else None
    transformer = loading.load_transformer(plan, group=None if ranks is None else ranks.tensor_group)
    transformer.set_attention(sdpa)
    return ranks, transformer


def drawn(plan):
    """Return the latents, and the bytes that this rank sent."""
    ranks, transformer = on_this_rank(plan)
    generator = torch.Generator().manual_seed(5)
    text = plan.settings.text
    embeds = PromptEmbeds(
        torch.randn(2, text.t5_max_length, plan.settings.model.context_in_dim, generator=generator),
        torch.randn(2, plan.settings.model.vec_in_dim, generator=generator),
    )
    channels, _, rows, columns = plan.latent_shape
    ratio = plan.settings.vae.time_compression_ratio
    parts = reference_parts(plan.mode, lengths=plan.settings.condition.lengths, temporal_compression=ratio)
    references = [
        torch.randn(channels, (part.num_frames - 1) // ratio + 1, rows, columns, generator=generator) for part in parts
    ]
    with torch.inference_mode(), counted_bytes() as sent:
        evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
        latents = sample_latents(plan, evaluate, embeds, references or None, seed=3, ranks=ranks or ALONE)
    return latents, sent.num_bytes


def velocity(plan):
    """Return what the demo's transformer computes once."""
    ranks, transformer = on_this_rank(plan)
    evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
    given = inputs(transformer, batch=1, tokens=79, text=31)
    with torch.inference_mode():
        return evaluate(given.pop("packed_latents_BND"), **given)


def compiled_velocity(plan):
    """Return the same of compiled blocks, after attention was handed in anew, and how many graphs there are."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(loading, "prepare", lambda transformer, plan: compile_blocks(transformer, **COMPILED)):
        velocity(plan)
        return velocity(plan), counters["stats"]["unique_graphs"]


def not_compiled(problem):
    raise AssertionError(problem)


COMPILED = {"warn": not_compiled, "backend": "eager"}


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_compiled_blocks_exchange_tokens_in_one_graph_of_each_kind(pool, degrees):
    expected = velocity(plan_of())
    for computed, graphs in pool(prod(degrees.values())).run(compiled_velocity, plan_of("t2v", degrees)):
        assert_close(computed, expected)
        assert graphs == 2


@pytest.mark.parametrize(
    ("mode", "degrees", "step_bytes"),
    [
        ("v2v_tail", {"ulysses": 2}, 30_146_560),
        # Every condition and every way to share the work at least once.
        *(
            pytest.param(mode, degrees, step_bytes, marks=pytest.mark.slow)
            for mode, degrees, step_bytes in (
                ("i2v_head", {"ulysses": 2, "ring": 2}, 61_603_840),
                ("t2v", {"ring": 2}, 30_146_560),
                ("i2v_tail", {"tensor_parallel": 2}, 34_603_008),
                ("i2v_loop", {"cfg_parallel": 2}, 1_310_720),
                ("v2v_head", {"ulysses": 4}, 47_185_920),
                ("v2v_head_easy", {"ring": 4}, 123_469_824),
                ("v2v_tail_easy", {"tensor_parallel": 4}, 141_557_760),
                ("i2v_loop", {"cfg_parallel": 2, "ulysses": 2}, 32_768_000),
                ("t2v", {"cfg_parallel": 2, "ring": 2}, 32_768_000),
                ("i2v_head", {"cfg_parallel": 2, "tensor_parallel": 2}, 37_224_448),
                ("i2v_head", {"tensor_parallel": 2, "ulysses": 2}, 66_060_288),
                ("v2v_tail", {"tensor_parallel": 2, "ring": 2}, 66_060_288),
            )
        ),
    ],
    ids=str,
)
def test_ranks_sample_what_one_process_samples(pool, mode, degrees, step_bytes):
    plan, expected = plan_of(mode, degrees), drawn(plan_of(mode))[0]
    answers = pool(plan.mesh.size).run(drawn, plan)
    assert len(answers) == prod(degrees.values())
    for latents, _ in answers:
        assert torch.equal(latents, answers[0][0])
        assert torch.linalg.vector_norm(latents - expected) <= 1e-3 * torch.linalg.vector_norm(expected)
    noise = (len(answers) - 1) * expected.nbytes
    # Before the first step rank 0 sends the noise, and a short description of it.
    assert 0 <= sum(sent for _, sent in answers) - step_bytes - noise < 1000 * len(answers)


def mapped(plan):
    """Return the bytes of the weights, the file that each of them maps, and the bytes that this rank has for itself."""
    machine_group = Ranks(torch.device("cpu"), plan.mesh).machine_group
    transformer = loading.load_transformer(plan, machine_group=machine_group)
    held = [weight for weight in transformer.state_dict().values() if weight.device.type == "cpu"]
    assert sum(float(weight.float().sum()) for weight in held) != 0  # touches every page
    files, own_bytes = mapped_files(held)
    own_bytes += sum(weight.nbytes for weight, file in zip(held, files, strict=True) if file == NO_FILE)
    dist.barrier()  # no file is deleted, and its inode reused, before all ranks have looked
    return sum(weight.nbytes for weight in held), files, own_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's account of memory")
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        pytest.param("fp32", {}, id="as in the file"),
        pytest.param("fp16", {}, id="of another dtype"),
        pytest.param("fp32", {"memory.fp8_storage": True, "memory.offload": "blocks"}, id="in 8 bits"),
    ],
)
def test_ranks_share_one_copy_of_the_weights(pool, tmp_path, dtype, changes):
    path = packaged_demo() / "transformer.safetensors"
    if dtype != "fp16":
        target = tmp_path / path.name
        assert main(["ckpt", "convert", str(path), str(target), "--dtype", dtype, "--quiet"]) == 0
        path = target
    answers = pool(2).run(mapped, plan_of("t2v", {"ulysses": 2}, transformer=str(path), **changes))
    size, files, _ = answers[0]
    assert size > 10e6
    for also_size, also_files, own_bytes in answers:
        assert (also_size, also_files) == (size, files)
        assert own_bytes < 0.05 * size


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Return one of all layers, a stronger one of the layers that osora trains, and a file as diffusers has it."""
    folder = tmp_path_factory.mktemp("loras")
    transformer = transformer_on_meta(plan_of().settings.model)
    in_blocks = r".*_blocks\..*(proj|v_mlp|linear2|mlp\.\d)"
    hidden, mlp = transformer.config.hidden_size, transformer.config.mlp_hidden_size
    fused = fused_factors({"single_blocks.1.linear1.weight": torch.empty(3 * hidden + mlp, hidden)}, size=0.1)
    return (
        str(write_styles(folder, fused, hidden=hidden)["diffusers"]),
        str(write_lora(folder / "all", transformer, rank=3)),
        f"{write_lora(folder / 'blocks', transformer, like=in_blocks, rank=4, seed=500)}:-0.5",
    )


def drawn_with_adapters(degrees, changes):
    """Return the latents, the adapters' bytes on this rank, and their number."""
    plan = plan_of("t2v", degrees, frames=5, **changes)
    layers = [module for module in on_this_rank(plan)[1].modules() if isinstance(module, LowRankLinear)]
    held = storage_bytes(part for layer in layers for part in (layer.lora_a, layer.lora_b))
    return drawn(plan)[0], held, len(layers)


@pytest.mark.parametrize(
    ("degrees", "fp8_storage", "tolerance"),
    [
        ({"tensor_parallel": 2}, False, 1e-3),
        # Halves of a row have scales of their own.
        pytest.param({"tensor_parallel": 2}, True, 0.05, marks=pytest.mark.slow),
        pytest.param({"ulysses": 2}, False, 1e-3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_divide_adapters_with_their_layers(pool, adapters, degrees, fp8_storage, tolerance):
    changes = {"loras": adapters, "memory.fp8_storage": fp8_storage}
    expected, whole_bytes, whole = drawn_with_adapters({}, changes)
    for latents, held, count in pool(2).run(drawn_with_adapters, degrees, changes):
        assert count == whole == 77
        assert torch.linalg.vector_norm(latents - expected) <= tolerance * torch.linalg.vector_norm(expected)
        if "tensor_parallel" in degrees:
            assert 0.4 * whole_bytes < held < 0.8 * whole_bytes
        else:
            assert held == whole_bytes
