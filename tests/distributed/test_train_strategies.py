"""Every strategy of training over real processes against one process: losses, gradients, weights, bytes."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from closeness import assert_close
from shared_models import shard_transformer
from tiny_strategies import (
    MAX_NORM,
    Case,
    Figures,
    Run,
    figures,
    micro_batch,
    tiny_transformer,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.train.distribution import Distribution, local, mesh_shape
from opensora_cli.memory.checkpointing import HostActivations, set_grad_checkpoint
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.train_loop import Compute

Pool = Callable[[int], Any]
Trained = Callable[[Case], Any]

STEPS = 4
DATA = [
    *(Case(strategy, 2) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    Case("zero3", 4),
    (REPLICATED := Case("zero1", 4, (("dp_replicate_degree", 2),))),
    (GROUPS := Case("zero3", 4, (("dp_shard_degree", 2),))),
]
HYBRID = [
    Case("hybrid", 2, (("tensor_parallel_degree", 2),)),
    Case("hybrid", 2, (("ulysses_degree", 2),)),
    Case("hybrid", 2, (("ring_degree", 2),)),
    Case("hybrid", 4, (("tensor_parallel_degree", 2),)),
    Case("hybrid", 4, (("ring_degree", 2), ("dp_replicate_degree", 2))),
    Case("hybrid", 4, (("tensor_parallel_degree", 2), ("ulysses_degree", 2))),
    Case("hybrid", 4, (("tensor_parallel_degree", 2), ("ring_degree", 2))),
    Case("hybrid", 4, (("ulysses_degree", 2), ("ring_degree", 2))),
]
TENSOR, ULYSSES, RING = HYBRID[:3]
TENSOR_AND_ULYSSES, TENSOR_AND_RING = HYBRID[5:7]
WHOLE_COPIES = Case("zero2", 2, (("dp_replicate_degree", 2),))
"""Nothing is divided, though the strategy would."""
SENT_BYTES = {
    "ddp-2": 563_032,
    "zero1-2": 564_032,
    "zero1-4-dp_replicate2": 1_692_080,
    "zero2-2": 846_040,
    "zero3-2": 1_532_896,
    "zero3-4": 2_308_224,
    "zero3-4-dp_shard2": 2_096_928,
    "hybrid-2-tensor_parallel2": 141_200,
    "hybrid-2-ulysses2": 1_590_240,
    "hybrid-2-ring2": 1_647_584,
    "hybrid-4-tensor_parallel2": 1_365_016,
    "hybrid-4-ring2-dp_replicate2": 2_211_616,
    "hybrid-4-tensor_parallel2-ulysses2": 2_648_192,
    "hybrid-4-tensor_parallel2-ring2": 2_705_536,
    "hybrid-4-ulysses2-ring2": 4_790_480,
}
"""Bytes that all ranks send in one update: weights gathered, gradients reduced, tokens and features exchanged."""
FAST = [Case("ddp", 2), Case("zero2", 2), GROUPS, TENSOR]
SLOW = [case for case in (*DATA, *HYBRID) if case not in FAST]


def _cases(fast: Iterable[Case], slow: Iterable[Case] = ()) -> pytest.MarkDecorator:
    """Parametrize a test by cases, of which some are for the slow tier."""
    marked = [*(pytest.param(case) for case in fast), *(pytest.param(case, marks=pytest.mark.slow) for case in slow)]
    return pytest.mark.parametrize("case", marked, ids=str)


def _alone() -> Distribution:
    return Distribution(torch.device("cpu"))


def _blocks(model: MMDiT) -> list[nn.Module]:
    return [*model.double_blocks, *model.single_blocks]


@cache
def _expected(micro_batches: int) -> Figures:
    alone = figures(_alone(), micro_batches, STEPS)
    assert alone.evaluated[-1] < 0.96 * alone.evaluated[0]
    # Some gradients are clipped, others are not.
    assert min(alone.norms) < MAX_NORM < max(alone.norms)
    return alone


def _figures_of_rank(case: Case) -> tuple[Figures, int]:
    """Return them, and the bytes of a rank's share of the weights."""
    distribution, plain = case.open(), tiny_transformer()
    shard_transformer(plain, distribution.mesh.group("tensor"))
    rows = distribution.mesh.group("shard", "ring", "ulysses")
    return figures(distribution, case.micro_batches, STEPS), _row_bytes(plain.parameters(), rows.size(), rows.rank())


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Callable[[Case], list[tuple[Figures, int]]]:
    """Train once by each strategy."""
    return cache(lambda case: pool(case.ranks).run(_figures_of_rank, case))


@_cases(FAST, [*SLOW, WHOLE_COPIES])
def test_losses_are_those_of_one_process(trained: Trained, case: Case) -> None:
    _assert_as_alone(trained(case), _expected(case.micro_batches))


def _assert_as_alone(ranks: Iterable[tuple[Figures, int]], alone: Figures) -> None:
    for ours, _ in ranks:
        assert ours.losses == pytest.approx(alone.losses, rel=0, abs=1e-5)
        assert ours.norms == pytest.approx(alone.norms, rel=1e-4)
        assert ours.weights.keys() == alone.weights.keys()
        assert max((ours.weights[name] - weight).abs().max().item() for name, weight in alone.weights.items()) < 1e-4


@_cases(FAST, SLOW)
def test_bytes_held_and_sent_and_an_evaluation_that_changes_neither(trained: Trained, case: Case) -> None:
    whole = sum(weight.nbytes for weight in tiny_transformer().parameters())
    shape = mesh_shape(Strategy(case.strategy), case.parallel)
    for ours, share in trained(case):
        assert ours.held_bytes == (share, share, 2 * share)
        # Rows and heads are few here, and modulation and norms are whole on every tensor-parallel rank.
        assert share < (1.1 if shape.tensor == 1 else 0.9) * whole / (shape.shard * shape.ring * shape.ulysses)
        assert ours.evaluated == pytest.approx(_expected(case.micro_batches).evaluated, rel=0, abs=1e-5)
        assert ours.held_after_evaluating == {share}
    if shape.tensor == 1:
        assert sum(share for _, share in trained(case)) == shape.replicate * whole
    assert sum(ours.sent_bytes for ours, _ in trained(case)) == SENT_BYTES[str(case)]


def _row_bytes(weights: Iterable[Tensor], ranks: int, rank: int) -> int:
    return sum(rows[rank].nbytes for weight in weights if rank < len(rows := weight.chunk(ranks)))


def _held_within_an_update(case: Case) -> dict[str, float]:
    """Return what a rank holds between forward and backward, and between two micro-batches; as shares of the whole."""
    distribution, model = case.open(), tiny_transformer()
    whole = sum(weight.nbytes for weight in model.parameters())
    outside = whole - sum(weight.nbytes for block in _blocks(model) for weight in block.parameters())
    forward = distribution.shard(model)
    own_weights = list(model.parameters())
    given, target = micro_batch(model, distribution.data_rank)
    with distribution.accumulating(last=False):
        loss = (forward(given.pop("packed_latents_BND"), **given) - target).square().mean()
        weights = sum(local(weight).nbytes for weight in model.parameters())
        loss.backward()
    gradients = {id(weight): local(weight.grad).nbytes for weight in own_weights if weight.grad is not None}
    gradients |= {id(weight): local(weight.grad).nbytes for weight in model.parameters() if weight.grad is not None}
    return {"weights": weights / whole, "gradients": sum(gradients.values()) / whole, "outside": outside / whole}


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"), [("ddp", 1, 1), ("zero1", 1, 1), ("zero2", 1, 0.5), ("zero3", 0.5, 0.5)]
)
def test_what_is_held_within_an_update(pool: Pool, strategy: str, weights: float, gradients: float) -> None:
    for held in pool(2).run(_held_within_an_update, Case(strategy, 2)):
        # What is outside of blocks stays gathered until backward has come to the first layer.
        expected = weights + (1 - weights) * held["outside"]
        assert held["weights"] == pytest.approx(expected, rel=0.03)
        assert held["gradients"] == pytest.approx(gradients, rel=0.03)


def _round_trip(case: Case, mlp_ratio: float) -> tuple[int, list[str]]:
    """Return how many weights there are, and the names of those that do not come back as they were."""
    distribution, model = case.open(), tiny_transformer(mlp_ratio=mlp_ratio)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    distribution.shard(model)
    wrong, seen = [], set()
    for name, weight in model.named_parameters():
        whole_name = distribution.whole_name(name)
        seen.add(whole_name)
        half = expected[whole_name].to(torch.bfloat16)
        part = distribution.part(name, half)
        fine = (
            torch.equal(distribution.whole(name, weight), expected[whole_name])
            and torch.equal(distribution.part(name, expected[whole_name]), local(weight))
            and torch.equal(distribution.whole(name, part), half)
        )
        if not fine or part.data_ptr() == half.data_ptr() or distribution.whole(name, weight).requires_grad:
            wrong.append(name)
    assert seen == expected.keys()
    extra = torch.randn(3)
    assert torch.equal(distribution.whole("no such weight", distribution.part("no such weight", extra)), extra)
    return len(seen), wrong


@pytest.mark.parametrize(
    ("case", "mlp_ratio"),
    [
        (TENSOR_AND_ULYSSES, 0.125),
        *(
            pytest.param(case, mlp_ratio, marks=pytest.mark.slow)
            for case, mlp_ratio in ((ULYSSES, 0.625), (HYBRID[3], 0.125), (HYBRID[4], 0.125), (TENSOR_AND_RING, 0.625))
        ),
    ],
    ids=str,
)
def test_parts_make_up_the_whole_bit_for_bit(pool: Pool, case: Case, mlp_ratio: float) -> None:
    # With five features in the MLP the last of four ranks has none.
    for count, wrong in pool(case.ranks).run(_round_trip, case, mlp_ratio):
        assert count > 40
        assert wrong == []


def _in_a_mode(case: Case, backend: str | None, checkpoints: bool, offload: bool) -> tuple[list[float], int, int]:
    """Return the losses, how many bytes were copied to the host, and how many graphs were compiled."""
    model, graphs = tiny_transformer(), counters["stats"]
    graphs.clear()
    # Of one function so many versions are compiled and no more, and this process has met many models.
    torch._dynamo.reset()
    if backend is not None:
        compile_blocks(model, warn=pytest.fail, backend=backend)
    run = Run(case.open(), model, case.micro_batches)
    copies: list[int] = []
    held = HostActivations(on_copy=lambda copy: copies.append(copy.nbytes)) if offload else None
    with ExitStack() as stack:
        if checkpoints:
            stack.enter_context(set_grad_checkpoint(model, others=(OUTPUT_LAYER,), activations=held))
        run.step(3)
    return run.losses, sum(copies), graphs["unique_graphs"]


@pytest.mark.parametrize(
    ("case", "backend", "checkpoints", "offload"),
    [
        (Case("zero3", 2), None, True, True),
        (TENSOR, None, True, True),
        # Each way with ranks that divide weights and with others. Blocks of hybrid communicate, and are not compiled.
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (Case("ddp", 2), "aot_eager", True, True),
                (Case("zero2", 2), "aot_eager", False, False),
                (Case("zero3", 2), "aot_eager", True, True),
                (GROUPS, None, True, True),
                (RING, None, True, True),
                (TENSOR_AND_ULYSSES, None, True, True),
            )
        ),
    ],
    ids=str,
)
def test_checkpoints_offload_and_compiling_change_no_loss(
    pool: Pool, case: Case, backend: str | None, checkpoints: bool, offload: bool
) -> None:
    for losses, copied, graphs in pool(case.ranks).run(_in_a_mode, case, backend, checkpoints, offload):
        assert losses == pytest.approx(_expected(case.micro_batches).losses[:3], rel=0, abs=1e-5)
        assert (copied > 0) == offload
        assert backend is None or graphs >= 2


def _with_states_on_the_host(case: Case) -> tuple[list[float], list[float], set[str]]:
    run = Run(case.open(offload_states=True), tiny_transformer(), case.micro_batches)
    run.step(3)
    devices = {local(weight).device.type for weight in run.model.parameters()}
    return run.losses, run.norms, devices


@_cases([Case("zero3", 2)], [Case("zero1", 2), TENSOR_AND_ULYSSES])
def test_states_on_the_host_change_no_loss(pool: Pool, case: Case) -> None:
    expected = _expected(case.micro_batches)
    for losses, norms, devices in pool(case.ranks).run(_with_states_on_the_host, case):
        assert losses == pytest.approx(expected.losses[:3], rel=0, abs=1e-5)
        assert norms == pytest.approx(expected.norms[:3], rel=1e-4)
        assert devices == {"cpu"}


def _in_half_precision(case: Case) -> tuple[list[float], set[torch.dtype]]:
    run = Run(case.open(torch.bfloat16), tiny_transformer(), case.micro_batches, Compute.BF16)
    run.step(STEPS)
    kept = [run.model.parameters(), (weight.grad for weight in run.model.parameters())]
    return run.losses, {tensor.dtype for tensors in kept for tensor in tensors}


@_cases([Case("zero3", 2)], [Case("ddp", 2), Case("zero2", 4), TENSOR_AND_RING])
def test_half_precision_is_for_computing_alone(pool: Pool, case: Case) -> None:
    expected = _expected(case.micro_batches).losses
    for losses, kept in pool(case.ranks).run(_in_half_precision, case):
        assert losses == pytest.approx(expected, rel=0.04)
        assert losses != pytest.approx(expected, rel=0, abs=1e-6)
        assert kept == {torch.float32}


def _with_frozen_weights(case: Case, alone: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = tiny_transformer()
    for name, weight in model.named_parameters():
        weight.requires_grad_("q_proj" in name or "query_norm" in name)
    run = Run(_alone() if alone else case.open(), model, case.micro_batches)
    run.step(3)
    return run.losses, run.norms, run.whole()


@_cases([TENSOR_AND_ULYSSES], [HYBRID[3], HYBRID[4]])
def test_frozen_weights_keep_their_values(pool: Pool, case: Case) -> None:
    losses, norms, weights = _with_frozen_weights(case, True)
    before = dict(tiny_transformer().named_parameters())
    for our_losses, our_norms, our_weights in pool(case.ranks).run(_with_frozen_weights, case, False):
        assert our_losses == pytest.approx(losses, rel=0, abs=1e-5)
        assert our_norms == pytest.approx(norms, rel=1e-4)
        for name, weight in weights.items():
            is_trained = "q_proj" in name or "query_norm" in name
            assert_close(our_weights[name], weight, tolerance=1e-4)
            assert torch.equal(our_weights[name], before[name]) != is_trained


def _not_finite(case: Case) -> tuple[float, bool, bool, float]:
    """Spoil a gradient on the last rank, and return the norm, whether any rank and whether no rank says so, a mean."""
    run = Run(case.open(), tiny_transformer(), case.micro_batches)
    run.find_gradient()
    distribution = run.distribution
    if distribution.rank == distribution.ranks - 1:
        # Of a weight that no other rank has the same rows and features of.
        local(run.model.single_blocks[0].q_proj.weight.grad)[0, 0] = float("inf")
    norm = distribution.clip_grad_norm(dict(run.model.named_parameters()), 1.0).item()
    mean = distribution.mean({"rank": float(distribution.data_rank)})["rank"]
    return norm, distribution.any(distribution.rank == 1), distribution.any(False), mean


@_cases([TENSOR], [Case("zero1", 2), Case("zero3", 4), ULYSSES])
def test_an_infinite_gradient_is_seen_by_all_ranks(pool: Pool, case: Case) -> None:
    for norm, some, none, mean in pool(case.ranks).run(_not_finite, case):
        assert norm == float("inf")
        assert (some, none) == (True, False)
        assert mean == (case.parallel.data_ranks(Strategy(case.strategy)) - 1) / 2
