"""Several ranks draw the video that one draws: the demo, under all conditions and by every way to share its work."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opensora_cli.cli.app import main
from opensora_cli.engine import build
from opensora_cli.engine.draw import sample_latents
from opensora_cli.engine.plan import make_plan
from opensora_cli.engine.prompts import PromptEmbeds
from opensora_cli.engine.ranks import Ranks
from opensora_cli.engine.sampling.conditioning import reference_parts
from opensora_cli.engine.weights import packaged_demo
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention import sdpa
from opensora_cli.settings.enums import ConditionMode
from opensora_cli.settings.load import load_preset

STEPS = 2


def plan_of(mode, degrees, frames=17, transformer="transformer.safetensors"):
    references = {"i2v_loop": ("a.png", "b.png")}.get(mode, ("a.png",)) if mode != "t2v" else ()
    settings = load_preset("demo", prompt="raining, sea").replace(
        {
            "runtime.device": "cpu",
            "files.transformer": transformer,
            "sampling.num_inference_steps": STEPS,
            "video.num_frames": frames,
            "video.max_frames": frames,
            "condition.mode": mode,
            "condition.references": references,
            "parallel.gpus": dist.get_world_size() if degrees else None,
            **{f"parallel.{axis}_degree": degree for axis, degree in degrees.items()},
        }
    )
    return make_plan(settings)


@cache
def demo():
    return build.load_transformer(plan_of("t2v", {}))


def sharded(plan, ranks):
    return (
        demo()
        if ranks is None or ranks.tensor_group is None
        else build.load_transformer(plan, group=ranks.tensor_group)
    )


def drawn(mode, degrees):
    """Return the shape of the mesh and the latents."""
    plan = plan_of(mode, degrees)
    ranks = Ranks(plan.mesh, torch.device("cpu")) if degrees else None
    transformer = sharded(plan, ranks)
    transformer.set_attention(sdpa)
    generator = torch.Generator().manual_seed(5)
    text = plan.settings.text
    embeds = PromptEmbeds(
        torch.randn(2, text.t5_max_length, plan.settings.model.context_in_dim, generator=generator),
        torch.randn(2, plan.settings.model.vec_in_dim, generator=generator),
    )
    channels, _, rows, columns = plan.latent_shape
    ratio = plan.settings.vae.time_compression_ratio
    parts = reference_parts(plan.mode, lengths=plan.lengths, temporal_compression=ratio)
    references = [
        torch.randn(channels, (part.num_frames - 1) // ratio + 1, rows, columns, generator=generator) for part in parts
    ]
    with torch.inference_mode():
        evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
        latents = sample_latents(plan, evaluate, embeds, references or None, seed=3, ranks=ranks)
    return plan.mesh, latents


@pytest.mark.parametrize("mode", list(ConditionMode))
def test_every_condition_on_two_ranks(pool, mode):
    [(_, expected), _] = pool(2).run(drawn, str(mode), {})
    for _, latents in pool(2).run(drawn, str(mode), {"ulysses": 2}):
        assert torch.linalg.vector_norm(latents - expected) <= 1e-3 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize(
    "degrees",
    [
        {"ulysses": 4},
        {"ring": 4},
        {"ulysses": 2, "ring": 2},
        {"cfg_parallel": 2},
        {"cfg_parallel": 2, "ring": 2},
        {"tensor_parallel": 2, "ulysses": 2},
    ],
    ids=str,
)
def test_every_way_on_four_ranks(pool, degrees):
    expected = pool(4).run(drawn, "i2v_head", {})[0][1]
    answers = pool(4).run(drawn, "i2v_head", degrees)
    shapes = {mesh for mesh, _ in answers}
    assert len(shapes) == 1
    assert shapes.pop().size == 4
    for _, latents in answers:
        assert torch.equal(latents, answers[0][1])
        assert torch.linalg.vector_norm(latents - expected) <= 1e-3 * torch.linalg.vector_norm(expected)


def held(degrees, frames):
    """Return the bytes beside the weights that sampling is predicted to take on this rank, and those it took."""
    plan = plan_of("t2v", degrees, frames)
    ranks = Ranks(plan.mesh, torch.device("cpu"))
    transformer = demo()
    transformer.set_attention(sdpa)
    embeds = PromptEmbeds(
        torch.zeros(2, plan.settings.text.t5_max_length, plan.settings.model.context_in_dim),
        torch.zeros(2, plan.settings.model.vec_in_dim),
    )
    with torch.inference_mode(), TensorBytes() as counter:
        counter.add([embeds.prompt_embeds_2LC, embeds.pooled_prompt_embeds_2V])
        sample_latents(plan, ranks.share_tokens(transformer), embeds, None, seed=3, ranks=ranks)
    stage = next(stage for stage in plan.stages if stage.name == "denoise")
    return stage.data_bytes + stage.activation_bytes, counter.peak_bytes


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_memory_of_a_rank_is_predicted(pool, degrees):
    for predicted, peak in pool(2).run(held, degrees, 129):
        assert predicted == pytest.approx(peak, rel=0.1)


def added_pss(path):
    """Return by how many bytes loading the weights raises this rank's share of the machine's memory."""

    def pss():
        rollup = Path("/proc/self/smaps_rollup").read_text()
        return 1024 * int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])

    plan = plan_of("t2v", {"ulysses": 4}, transformer=path)
    before = pss()
    transformer = build.load_transformer(plan)
    assert sum(float(weight.sum()) for weight in transformer.parameters()) != 0  # touches every page
    dist.barrier()
    added = pss() - before
    dist.barrier()  # nobody unmaps what another still counts
    return added


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's account of pages")
def test_ranks_share_one_copy_of_the_weights(pool, tmp_path):
    path = tmp_path / "transformer.safetensors"
    assert main(["ckpt", "convert", str(packaged_demo() / path.name), str(path), "--dtype", "fp32", "--quiet"]) == 0
    size = path.stat().st_size
    assert size > 50e6
    added = sum(pool(4).run(added_pss, str(path)))
    assert 0.9 * size < added < 1.2 * size
