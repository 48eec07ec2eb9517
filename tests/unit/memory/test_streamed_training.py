"""An adapter's gradients beside streamed blocks: those of a resident model, from a few blocks' memory."""

import pytest
import torch
from late_stream import install
from tiny_transformer import OUTSIDE_BLOCKS, assert_same, gradients, inputs, transformer
from torch import Tensor, nn

from opensora_cli.engine.train.lora import add_lora
from opensora_cli.memory.checkpointing import RECOMPUTING, set_grad_checkpoint
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.host_weights import BlockWeights, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.settings.train_sections import LoraSettings

DOUBLE, SINGLE = 2, 3


def with_adapter(dtype: torch.dtype = torch.float32, *, fp8: bool = False) -> MMDiT:
    model = transformer(depth=DOUBLE, single=SINGLE).to(dtype)
    add_lora(model, LoraSettings(rank=4, dropout=0.25), seed=0)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    if fp8:
        store_in_fp8(model.double_blocks, frozen=True)
        store_in_fp8(model.single_blocks, frozen=True)
    return model


def stacks(model: MMDiT) -> list[nn.ModuleList]:
    return [model.double_blocks, model.single_blocks]


def found(model: MMDiT, *, bf16: bool = False) -> list[dict[str, Tensor]]:
    """Return gradients of two micro-batches, and the result of a pass without any between them."""
    results = []
    with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for seed in range(2):
            torch.manual_seed(seed)
            results.append(gradients(model, inputs(model, seed=seed)))
            with torch.no_grad():
                results.append({"velocity": model(**inputs(model, seed=seed + 5))})
    return results


def check(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if "loss" in one:
            assert_same(one, other)
        else:
            assert torch.equal(one["velocity"], other["velocity"])


@pytest.mark.parametrize(
    ("resident", "source", "form"),
    [
        pytest.param(1, "mapped", "fp32", marks=pytest.mark.slow),
        (2, "mapped", "bf16"),
        (4, "pinned", "fp8"),
        (9, "mapped", "cast"),
    ],
)
def test_gradients_are_those_of_a_resident_model(deterministic, resident, source, form):
    dtype = torch.float32 if form in ("fp32", "fp8") else torch.bfloat16
    of_file, expected = with_adapter(dtype, fp8=form == "fp8"), with_adapter(dtype, fp8=form == "fp8")
    if form == "cast":
        expected.float()
        for part in set(of_file.children()) - set(stacks(of_file)):
            part.float()
    trained = [weight for weight in of_file.parameters() if weight.requires_grad]
    casts = torch.float32 if form == "cast" else None
    with stream_blocks(
        stacks(of_file), device="cpu", resident=resident, source=source, dtype=casts, trains=True
    ) as figures:
        sizes = [BlockWeights(block, casts, frozen=True).nbytes for stack in stacks(of_file) for block in stack]
        assert figures.device_bytes == streaming_bytes(sizes, resident=resident)
        check(found(of_file, bf16=form == "bf16"), found(expected, bf16=form == "bf16"))
    # The adapter that an optimizer has is the one that learns.
    after = [weight for weight in of_file.parameters() if weight.requires_grad]
    assert all(one is other for one, other in zip(after, trained, strict=True))
    assert not any(RECOMPUTING in vars(module) for module in of_file.modules())


def test_a_step_copies_each_block_twice_but_for_those_where_it_turns(deterministic):
    model = with_adapter()
    sizes = [BlockWeights(block, frozen=True).nbytes for stack in stacks(model) for block in stack]
    with (
        stream_blocks(stacks(model), device="cpu", resident=2, trains=True) as figures,
        set_grad_checkpoint(model, others=OUTSIDE_BLOCKS),
    ):
        # The first two are there from the beginning, and again after each step.
        for _ in range(3):
            before = figures.copied_bytes
            gradients(model, inputs(model))
            assert figures.copied_bytes - before == sum(sizes[2:]) + sum(sizes[:-2])


@pytest.mark.parametrize("resident", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_copies_are_waited_for_and_leave_alone_what_is_still_computed_with(deterministic, monkeypatch, resident):
    expected = found(with_adapter())
    install(monkeypatch)
    model = with_adapter()
    with stream_blocks(stacks(model), device="cpu", resident=resident, trains=True):
        check(found(model), expected)


def test_blocks_without_a_checkpoint_are_refused_where_gradients_are_recorded(deterministic):
    model = with_adapter()
    with stream_blocks(stacks(model), device="cpu", resident=2, trains=True):
        with (
            set_grad_checkpoint(model, depth={"single_blocks": 1}),
            pytest.raises(RuntimeError, match="must be checkpointed"),
        ):
            gradients(model, inputs(model))
        with torch.no_grad():
            assert torch.equal(model.eval()(**inputs(model)), with_adapter().eval()(**inputs(model)))
