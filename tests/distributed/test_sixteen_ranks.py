"""Sixteen ranks, as threads of one process, sample what one does and find its gradients, on every mesh there is."""

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, relative_error
from shared_models import plan_without_estimate
from threaded_ranks import run_in_threads
from tiny_strategies import Case, Run, tiny_transformer
from tiny_world import save_weights
from torch import Tensor

from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.loading import load_transformer
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.process import ALONE
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.train.distribution import Distribution, local
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.load import load_preset

RANKS = 16
HEADS = 16
HIDDEN = 8 * HEADS
STEPS = 2


def _plan(weights: Path, degrees: dict[str, int]) -> Plan:
    settings = load_preset("demo", prompt="raining, sea").replace(
        {
            "model.hidden_size": HIDDEN,
            "model.num_heads": HEADS,
            "model.axes_dim": (4, 2, 2),
            "model.depth": 1,
            "model.depth_single_blocks": 1,
            # 19 tokens of text and 45 of latents, which 2, 4, 8 and 16 ranks divide unevenly.
            "text.t5_max_length": 19,
            "video.height": 48,
            "video.width": 80,
            "video.num_frames": 9,
            "sampling.num_inference_steps": STEPS,
            "condition.mode": "i2v_head",
            "condition.references": ("a.png",),
            "files.transformer": str(weights),
            "runtime.device": "cpu",
            "parallel.gpus": RANKS if degrees else None,
            **{f"parallel.{axis}_degree": degree for axis, degree in degrees.items()},
        }
    )
    return plan_without_estimate(settings)


def _sampled(plan: Plan) -> Tensor:
    ranks = Ranks(plan.mesh, torch.device("cpu")) if plan.mesh.size > 1 else None
    transformer = load_transformer(plan, group=None if ranks is None else ranks.tensor_group)
    transformer.set_attention(sdpa)
    generator, model = torch.Generator().manual_seed(5), plan.settings.model
    embeds = PromptEmbeds(
        torch.randn(2, plan.settings.text.t5_max_length, model.context_in_dim, generator=generator),
        torch.randn(2, model.vec_in_dim, generator=generator),
    )
    channels, _, rows, columns = plan.latent_shape
    reference_CTHW = torch.randn(channels, 1, rows, columns, generator=generator)
    with torch.inference_mode():
        evaluate = transformer if ranks is None else ranks.share_tokens(transformer)
        return sample_latents(plan, evaluate, embeds, [reference_CTHW], seed=3, ranks=ranks or ALONE)


def _absent() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has no time")
    dist.barrier()


def test_a_rank_that_fails_fails_the_others_that_wait_for_it() -> None:
    with pytest.raises(ValueError, match="rank 1 has no time"):
        run_in_threads(3, _absent)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of weights with sixteen heads."""
    path = tmp_path_factory.mktemp("sixteen") / "transformer.safetensors"
    save_weights(path, MMDiT(mmdit_config(_plan(path, {}).settings.model)))
    return path


@cache
def _sampled_alone(weights: Path) -> Tensor:
    return _sampled(_plan(weights, {}))


@pytest.mark.parametrize(
    ("cfg", "ring", "ulysses", "tensor"),
    [
        (2, 2, 2, 2),
        # Every pair of axes with more than one rank, every axis alone, and two and four ranks along each.
        *(
            pytest.param(*degrees, marks=pytest.mark.slow)
            for degrees in (
                *((1, 16, 1, 1), (1, 1, 16, 1), (1, 1, 1, 16)),
                *((2, 8, 1, 1), (2, 1, 4, 2), (1, 4, 1, 4), (1, 2, 8, 1)),
            )
        ),
    ],
)
def test_sixteen_ranks_sample_what_one_samples(weights: Path, cfg: int, ring: int, ulysses: int, tensor: int) -> None:
    degrees = {"cfg_parallel": cfg, "ring": ring, "ulysses": ulysses, "tensor_parallel": tensor}
    expected, plan = _sampled_alone(weights), _plan(weights, degrees)
    answers = run_in_threads(RANKS, _sampled, plan)
    assert plan.mesh.size == len(answers) == RANKS
    assert all(torch.equal(latents, answers[0]) for latents in answers)
    assert_close(answers[0], expected, tolerance=1e-4)


def _micro_batches(case: Case) -> int:
    return 2 * case.parallel.data_ranks(Strategy(case.strategy))


def _run(distribution: Distribution, micro_batches: int) -> Run:
    run = Run(distribution, tiny_transformer(hidden=HIDDEN, heads=HEADS), micro_batches, latent_tokens=45)
    run.find_gradient()
    return run


@cache
def _trained_alone(micro_batches: int) -> Run:
    return _run(Distribution(torch.device("cpu")), micro_batches)


def _trained(case: Case, expected: dict[str, Tensor]) -> tuple[list[float], list[float], float]:
    """Return loss and norm, and the largest error of this rank's part of the gradients."""
    run = _run(case.open(), _micro_batches(case))
    distribution, floor = run.distribution, 1e-3 * max(gradient.abs().max().item() for gradient in expected.values())
    errors = [
        relative_error(
            local(weight.grad), distribution.part(name, expected[distribution.whole_name(name)]), floor=floor
        )
        for name, weight in run.model.named_parameters()
    ]
    assert len(errors) == len(expected)
    return run.losses, run.norms, max(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("ddp", {}),
        ("zero1", {"dp_replicate": 2, "dp_shard": 8}),
        ("zero2", {"dp_replicate": 8, "dp_shard": 2}),
        ("zero3", {}),
        ("zero3", {"dp_replicate": 4, "dp_shard": 4}),
        # Every pair of axes once or more, and every axis alone.
        ("hybrid", {"ring": 16}),
        ("hybrid", {"ulysses": 16}),
        ("hybrid", {"tensor_parallel": 16}),
        ("hybrid", {"dp_replicate": 2, "dp_shard": 2, "ring": 2, "ulysses": 2}),
        ("hybrid", {"dp_replicate": 4, "tensor_parallel": 4}),
        ("hybrid", {"dp_shard": 4, "ring": 2, "tensor_parallel": 2}),
        ("hybrid", {"ring": 2, "ulysses": 4, "tensor_parallel": 2}),
    ],
    ids=str,
)
def test_sixteen_ranks_find_the_gradient_that_one_finds(strategy: str, degrees: dict[str, int]) -> None:
    case = Case(strategy, RANKS, tuple((f"{axis}_degree", degree) for axis, degree in degrees.items()))
    alone = _trained_alone(_micro_batches(case))
    gradients = {name: weight.grad for name, weight in alone.model.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    answers = run_in_threads(RANKS, _trained, case, gradients)
    assert len(answers) == RANKS
    for losses, norms, error in answers:
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        assert norms == pytest.approx(alone.norms, rel=1e-5)
        assert error < 1e-3
