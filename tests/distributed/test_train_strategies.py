"""Every strategy of training on real ranks against one process: figures, weights, bytes, resume."""

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from closeness import assert_close
from sent_bytes import counted_bytes
from shared_models import shard_transformer
from tiny_strategies import (
    OPTIMIZER,
    Case,
    Learned,
    NumberedBatch,
    VelocityTask,
    assert_near,
    cases,
    micro_batch,
    numbered_trainer,
    open_case,
    tiny_transformer,
    whole_weights,
)
from torch import Tensor
from torch._dynamo.utils import counters

from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.train.checkpoints import CheckpointWriter, restore
from opensora_cli.engine.train.distribution import Distribution, local, mesh_shape
from opensora_cli.engine.train.parallelize import shard
from opensora_cli.engine.train.trainer import MODEL, Trainer
from opensora_cli.memory.checkpointing import HostActivations, set_grad_checkpoint
from opensora_cli.models.mmdit.blocks import OUTPUT_LAYER
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.devices import Strategy
from opensora_cli.settings.train_sections import Compute

STEPS = 4
SAVED_STEPS = 2
DATA = [
    *(Case(strategy, 2) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    Case("zero3", 4),
    Case("zero1", 4, (("dp_replicate_degree", 2),)),
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
ZERO3 = Case("zero3", 2)
TENSOR, ULYSSES, RING = HYBRID[:3]
TENSOR_AND_ULYSSES, TENSOR_AND_RING = HYBRID[5:7]
WHOLE_COPIES = Case("zero2", 2, (("dp_replicate_degree", 2),))
"""Nothing is divided, although the strategy divides."""
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


def _blocks(model: MMDiT) -> list[Any]:
    return [*model.double_blocks, *model.single_blocks]


def _learned(case: Case | None, micro_batches: int, output: Path) -> Learned:
    distribution = open_case(case)
    trainer = numbered_trainer(VelocityTask(tiny_transformer()), distribution, micro_batches=micro_batches)
    losses, norms, evaluated, held = [], [], [], set()
    for step in range(STEPS):
        figures = trainer.do_step().figures
        losses.append(figures["loss"])
        norms.append(figures["grad_norm"])
        if step + 1 == SAVED_STEPS:
            with CheckpointWriter(output) as writer:
                saved = writer.save(trainer)
        if step < 3:
            with torch.no_grad(), distribution.evaluating():
                evaluated.append(trainer.task.loss(NumberedBatch(999), SampleRng.of(0, 0))[0].item())
            held.add(sum(local(weight).nbytes for weight in trainer.task.module.parameters()))
    weights, averages = whole_weights(trainer), whole_weights(trainer, trainer.ema)
    # The means of figures and the flags for skipped steps are a few bytes, whatever the strategy.
    with patch.multiple(distribution, mean=dict, any=bool), counted_bytes() as sent:
        trainer.do_step()
    return Learned(
        losses,
        norms,
        weights,
        averages,
        evaluated,
        _held_bytes(trainer),
        held,
        sent.num_bytes,
        _share_bytes(distribution),
        saved,
    )


def _held_bytes(trainer: Trainer) -> tuple[int, int, int]:
    weights = list(trainer.task.module.parameters())
    states = [optimizer.state[weight] for _, weight, optimizer in trainer.learners[MODEL].trained()]
    kept = [value for state in states for value in state.values() if value.ndim]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    found = [sum(local(tensor).nbytes for tensor in tensors) for tensors in (weights, gradients, kept)]
    return found[0], found[1], found[2]


def _share_bytes(distribution: Distribution) -> int:
    plain = tiny_transformer()
    if distribution.mesh is None:
        return sum(weight.nbytes for weight in plain.parameters())
    shard_transformer(plain, distribution.mesh.group("tensor"))
    rows = distribution.mesh.group("shard", "ring", "ulysses")
    of_ranks = [weight.chunk(rows.size()) for weight in plain.parameters()]
    return sum(parts[rows.rank()].nbytes for parts in of_ranks if rows.rank() < len(parts))


@pytest.fixture(scope="module")
def learned(pool, tmp_path_factory):
    return cache(
        lambda case: pool(case.ranks).run(_learned, case, case.micro_batches, tmp_path_factory.mktemp(str(case)))
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    def train(micro_batches: int) -> Learned:
        alone = _learned(None, micro_batches, tmp_path_factory.mktemp("alone"))
        assert alone.evaluated[-1] < 0.96 * alone.evaluated[0]
        # Some gradients are clipped, others are not.
        assert min(alone.norms) < OPTIMIZER.max_grad_norm < max(alone.norms)
        return alone

    return cache(train)


@cases(FAST, [*SLOW, WHOLE_COPIES])
def test_losses_are_those_of_one_process(learned, expected, case):
    alone = expected(case.micro_batches)
    for ours in learned(case):
        assert ours.losses == pytest.approx(alone.losses, rel=0, abs=1e-5)
        assert ours.norms == pytest.approx(alone.norms, rel=1e-4)
        assert_near(ours.weights, alone.weights, 1e-4)


@cases(FAST, SLOW)
def test_bytes_held_and_sent_and_an_evaluation_that_changes_neither(learned, expected, case):
    whole = sum(weight.nbytes for weight in tiny_transformer().parameters())
    shape = mesh_shape(Strategy(case.strategy), case.parallel)
    for ours in learned(case):
        assert ours.held_bytes == (ours.share, ours.share, 2 * ours.share)
        # Rows and heads are few here, and modulation and norms are whole on every tensor-parallel rank.
        assert ours.share < (1.1 if shape.tensor == 1 else 0.9) * whole / (shape.shard * shape.ring * shape.ulysses)
        assert ours.evaluated == pytest.approx(expected(case.micro_batches).evaluated, rel=0, abs=1e-5)
        assert ours.held_after_evaluating == {ours.share}
    if shape.tensor == 1:
        assert sum(ours.share for ours in learned(case)) == shape.replicate * whole
    assert sum(ours.sent_bytes for ours in learned(case)) == SENT_BYTES[str(case)]


def _resumed(case: Case | None, folder: Path, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    trainer = numbered_trainer(VelocityTask(tiny_transformer()), open_case(case), micro_batches=micro_batches)
    restore(trainer, folder)
    losses = [trainer.do_step().figures["loss"] for _ in range(STEPS - SAVED_STEPS)]
    return losses, whole_weights(trainer, trainer.ema)


@pytest.mark.parametrize(
    ("saved", "resumes"),
    [
        (TENSOR, None),
        (GROUPS, Case("zero1", 4)),
        *(
            pytest.param(saved, resumes, marks=pytest.mark.slow)
            for saved in (Case("ddp", 2), Case("zero2", 2), GROUPS, RING, HYBRID[3], TENSOR_AND_ULYSSES)
            for resumes in (None, saved)
        ),
    ],
    ids=str,
)
def test_what_some_ranks_save_others_resume(pool, learned, expected, saved, resumes):
    alone, folder = expected(saved.micro_batches), learned(saved)[0].saved
    given = (resumes, folder, saved.micro_batches)
    for losses, averages in pool(resumes.ranks).run(_resumed, *given) if resumes else [_resumed(*given)]:
        assert losses == pytest.approx(alone.losses[SAVED_STEPS:], rel=0, abs=1e-5)
        assert_near(averages, alone.averages, 1e-4)


OFFLOADED, STATES, HALF = "activations on the host", "states on the host", "half precision"
COMPILED, COMPILED_AND_OFFLOADED = "compiled", "compiled, activations on the host"


def _varied(case: Case, variant: str) -> tuple[list[dict[str, float]], int, int, set[torch.dtype]]:
    """Return figures of three steps, bytes copied to the host, the number of compiled graphs, and dtypes held."""
    model, graphs = tiny_transformer(), counters["stats"]
    graphs.clear()
    # The number of compiled versions of a function is limited, and this process has seen many models.
    torch._dynamo.reset()
    if COMPILED in variant:
        compile_blocks(model, warn=pytest.fail, backend="aot_eager")
    distribution = case.open(torch.bfloat16 if variant == HALF else None, offload_states=variant == STATES)
    options = {"micro_batches": case.micro_batches, "compute": Compute.BF16 if variant == HALF else Compute.FP32}
    trainer = numbered_trainer(VelocityTask(model), distribution, **options)
    copies: list[int] = []
    held = HostActivations(on_copy=lambda copy: copies.append(copy.nbytes))
    is_offloaded = OFFLOADED in variant
    with set_grad_checkpoint(model, others=(OUTPUT_LAYER,), activations=held) if is_offloaded else nullcontext():
        figures = [dict(trainer.do_step().figures) for _ in range(3)]
    weights = list(trainer.task.module.parameters())
    dtypes = {tensor.dtype for tensor in (*weights, *(weight.grad for weight in weights))}
    return figures, sum(copies), graphs["unique_graphs"], dtypes


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        *((ZERO3, variant) for variant in (OFFLOADED, STATES, HALF)),
        (TENSOR, OFFLOADED),
        # Each way with ranks that divide weights and with others. Blocks of hybrid communicate, and are not compiled.
        *(
            pytest.param(case, variant, marks=pytest.mark.slow)
            for variant, cases in {
                COMPILED_AND_OFFLOADED: (Case("ddp", 2), ZERO3),
                COMPILED: (Case("zero2", 2),),
                OFFLOADED: (GROUPS, RING, TENSOR_AND_ULYSSES),
                STATES: (Case("zero1", 2), TENSOR_AND_ULYSSES),
                HALF: (Case("ddp", 2), Case("zero2", 4), TENSOR_AND_RING),
            }.items()
            for case in cases
        ),
    ],
    ids=str,
)
def test_what_saves_memory_or_time_changes_no_loss(pool, expected, case, variant):
    alone = expected(case.micro_batches)
    for figures, copied, graphs, dtypes in pool(case.ranks).run(_varied, case, variant):
        losses, norms = ([each[name] for each in figures] for name in ("loss", "grad_norm"))
        assert losses == pytest.approx(alone.losses[:3], **({"rel": 0.04} if variant == HALF else {"abs": 1e-5}))
        assert (losses == pytest.approx(alone.losses[:3], rel=0, abs=1e-6)) <= (variant != HALF)
        assert variant == HALF or norms == pytest.approx(alone.norms[:3], rel=1e-4)
        assert (copied > 0) == (OFFLOADED in variant)
        assert COMPILED not in variant or graphs >= 2
        assert dtypes == {torch.float32}


def _with_frozen_weights(case: Case | None, micro_batches: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    model = tiny_transformer()
    for name, weight in model.named_parameters():
        weight.requires_grad_("q_proj" in name or "query_norm" in name)
    trainer = numbered_trainer(VelocityTask(model), open_case(case), micro_batches=micro_batches)
    return [dict(trainer.do_step().figures) for _ in range(3)], whole_weights(trainer)


@cases([TENSOR_AND_ULYSSES], [HYBRID[3], HYBRID[4]])
def test_frozen_weights_keep_their_values(pool, case):
    figures, weights = _with_frozen_weights(None, case.micro_batches)
    before = dict(tiny_transformer().named_parameters())
    for our_figures, ours in pool(case.ranks).run(_with_frozen_weights, case, case.micro_batches):
        for found, alone in zip(our_figures, figures, strict=True):
            assert found == pytest.approx(alone, rel=1e-4, abs=1e-5)
        for name, weight in weights.items():
            assert_close(ours[name], weight, tolerance=1e-4)
            assert torch.equal(ours[name], before[name]) != ("q_proj" in name or "query_norm" in name)


def _backward(case: Case, spoil: bool) -> tuple[dict[str, float], float, list[bool]]:
    """Return shares of the whole that a rank holds between forward and backward, and between two micro-batches; the
    norm of the gradient, which `spoil` makes infinite on the last rank, and what ranks that ask are answered.
    """
    distribution, model = case.open(), tiny_transformer()
    whole = sum(weight.nbytes for weight in model.parameters())
    outside = whole - sum(weight.nbytes for block in _blocks(model) for weight in block.parameters())
    forward = shard(model, distribution)
    own_weights = list(model.parameters())
    given, target = micro_batch(model, distribution.data_rank)
    with distribution.accumulating(last=spoil):
        loss = (forward(given.pop("packed_latents_BND"), **given) - target).square().mean()
        weights = sum(local(weight).nbytes for weight in model.parameters())
        loss.backward()
    gradients = {id(weight): weight.grad for weight in (*own_weights, *model.parameters()) if weight.grad is not None}
    held = sum(local(gradient).nbytes for gradient in gradients.values())
    if spoil and distribution.rank == distribution.ranks - 1:
        # No other rank has the same rows and features of this weight.
        local(model.single_blocks[0].q_proj.weight.grad)[0, 0] = float("inf")
    norm = distribution.clip_grad_norm(dict(model.named_parameters()), 1.0).item() if spoil else 0.0
    shares = {"weights": weights / whole, "gradients": held / whole, "outside": outside / whole}
    return shares, norm, [distribution.any(distribution.rank == 1), distribution.any(False)]


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"),
    [
        *(pytest.param(strategy, 1, 1, marks=pytest.mark.slow) for strategy in ("ddp", "zero1")),
        ("zero2", 1, 0.5),
        ("zero3", 0.5, 0.5),
    ],
)
def test_what_is_held_within_an_update(pool, strategy, weights, gradients):
    for held, *_ in pool(2).run(_backward, Case(strategy, 2), False):
        # Weights outside of blocks stay gathered until the backward pass has reached the first layer.
        assert held["weights"] == pytest.approx(weights + (1 - weights) * held["outside"], rel=0.03)
        assert held["gradients"] == pytest.approx(gradients, rel=0.03)


@cases([TENSOR], [Case("zero1", 2), Case("zero3", 4), ULYSSES])
def test_an_infinite_gradient_is_seen_by_all_ranks(pool, case):
    for _, norm, answers in pool(case.ranks).run(_backward, case, True):
        assert norm == float("inf")
        assert answers == [True, False]


def _round_trip(case: Case, mlp_ratio: float) -> tuple[int, list[str]]:
    """Return the number of weights, and the names of those that the parts of all ranks do not make up."""
    distribution, model = case.open(), tiny_transformer(mlp_ratio=mlp_ratio)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    shard(model, distribution)
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
def test_parts_make_up_the_whole_bit_for_bit(pool, case, mlp_ratio):
    # With five features in the MLP the last of four ranks has none.
    for count, wrong in pool(case.ranks).run(_round_trip, case, mlp_ratio):
        assert count > 40
        assert wrong == []
