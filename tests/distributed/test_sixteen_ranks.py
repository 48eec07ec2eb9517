"""Sixteen ranks, as threads of one process, sample what one does and find its gradients, on every mesh there is."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, relative_error
from pydantic import ValidationError
from shared_models import plan_without_estimate
from threaded_ranks import run_in_threads
from tiny_strategies import Case, Run, tiny_transformer
from tiny_world import save_weights
from torch import Tensor

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.engine.components.configs import mmdit_config
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.loading import load_transformer
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.engine.generate.process import ALONE
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.parallelize import local
from opensora_cli.models.attention.sdpa import sdpa
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.explain import explain
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.train import TrainSettings

RANKS = 16
HEADS = 16
HIDDEN = 8 * HEADS
STEPS = 2

Degrees = tuple[tuple[str, int], ...]


def _degrees(*axes: str) -> Iterator[Degrees]:
    """Yield all ways to divide the ranks along axes; those with one rank are left out."""
    for degrees in product((1, 2, 4, 8, 16), repeat=len(axes)):
        if prod(degrees) == RANKS:
            yield tuple((f"{axis}_degree", degree) for axis, degree in zip(axes, degrees, strict=True) if degree > 1)


def _twos(*axes: str) -> Degrees:
    """Return two ranks along each axis."""
    return tuple((f"{axis}_degree", 2) for axis in axes)


def _name(degrees: Degrees) -> str:
    return "-".join(f"{axis.removesuffix('_degree')}{degree}" for axis, degree in degrees)


def _plan(weights: Path, degrees: Degrees) -> Plan:
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
            **{f"parallel.{axis}": degree for axis, degree in degrees},
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
    save_weights(path, MMDiT(mmdit_config(_plan(path, ()).settings.model)))
    return path


@cache
def _sampled_alone(weights: Path) -> Tensor:
    return _sampled(_plan(weights, ()))


AXES = ("cfg_parallel", "ring", "ulysses", "tensor_parallel")


@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(each, id=_name(each), marks=() if each == _twos(*AXES) else pytest.mark.slow)
        for each in _degrees(*AXES)
        if dict(each).get("cfg_parallel_degree", 1) <= 2  # of the three branches of a step
    ],
)
def test_sixteen_ranks_sample_what_one_samples(weights: Path, degrees: Degrees) -> None:
    expected, plan = _sampled_alone(weights), _plan(weights, degrees)
    answers = run_in_threads(RANKS, _sampled, plan)
    assert plan.mesh.size == len(answers) == RANKS
    assert all(torch.equal(latents, answers[0]) for latents in answers)
    assert_close(answers[0], expected, tolerance=1e-4)


def _problems(case: Case) -> list[str]:
    """Return what the engine says against a case."""
    values = {
        "target": "mmdit",
        "strategy": case.strategy,
        "parallel": case.parallel.model_dump(),
        "model": {"hidden_size": HIDDEN, "num_heads": HEADS, "axes_dim": (4, 2, 2)},
        "precision": {"compute": "fp32"},
        "train_mmdit": {"mode_weights": {mode: float(mode == "t2v") for mode in CONDITION_MODES}},
    }
    try:
        TrainSettings.model_validate(values)
    except ValidationError as error:
        return explain(error)
    return []


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


OF_TRAINING = [
    Case("ddp", RANKS),
    *(
        Case(strategy, RANKS, degrees)
        for strategy in ("zero1", "zero2", "zero3")
        for degrees in _degrees("dp_replicate", "dp_shard")
    ),
    *(
        Case("hybrid", RANKS, degrees)
        for degrees in _degrees("dp_replicate", "dp_shard", "ring", "ulysses", "tensor_parallel")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in OF_TRAINING if not _problems(case)], ids=str)
def test_sixteen_ranks_find_the_gradient_that_one_finds(case: Case) -> None:
    alone = _trained_alone(_micro_batches(case))
    gradients = {name: weight.grad for name, weight in alone.model.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    answers = run_in_threads(RANKS, _trained, case, gradients)
    assert len(answers) == RANKS
    for losses, norms, error in answers:
        assert losses == pytest.approx(alone.losses, rel=1e-5)
        assert norms == pytest.approx(alone.norms, rel=1e-5)
        assert error < 1e-3
