"""Checkpoints from outside: equal gradients, what is wrapped, sequences, fp32 attention, and undoing it."""

import copy
from math import ceil

import pytest
import torch
from tiny_transformer import OUTSIDE_BLOCKS, assert_same, gradients, inputs, transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_cli.memory.activations import HostActivations
from opensora_cli.memory.checkpointing import auto_grad_checkpoint, set_grad_checkpoint
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention.sdpa import sdpa


class Held(HostActivations):
    """Counts the bytes that are copied to the host."""

    def __init__(self) -> None:
        super().__init__(on_copy=self.add)
        self.copied = 0

    def add(self, copy: Tensor) -> None:
        self.copied += copy.nbytes


class Calls:
    """Counts how often each of some modules computes."""

    def __init__(self, modules: nn.ModuleList) -> None:
        self.counts = [0] * len(modules)
        for index, module in enumerate(modules):
            # Of its first part: a hook of the block itself would not see the recomputation.
            next(part for part in module.modules() if isinstance(part, nn.Linear)).register_forward_pre_hook(
                lambda *_, index=index: self._count(index)
            )

    def _count(self, index: int) -> None:
        self.counts[index] += 1


class Noisy(nn.Module):
    """A block with dropout, which returns two streams and takes a condition by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor, shift: Tensor, *, tables: dict[str, tuple[Tensor, ...]]) -> tuple:
        x = x + self.dropout(self.linear(y).tanh()) * tables["pair"][0] + shift
        return x, y + tables["pair"][1] * x


class Stacked(nn.Module):
    """Runs its blocks as one sequence, and an input layer, through `auto_grad_checkpoint`."""

    def __init__(self, count: int = 5, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.2))
        self.blocks = nn.ModuleList(Noisy(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        tables = {"pair": (torch.ones(x.shape[-1]) * 0.5, torch.ones(x.shape[-1]) * 0.3)}
        y = auto_grad_checkpoint(self.first, x)
        x, y = auto_grad_checkpoint(self.blocks, x, y, torch.ones(1), tables=tables)
        return (x * y).sum()


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return {"loss": loss.detach(), **{name: weight.grad.clone() for name, weight in model.named_parameters()}}


@pytest.mark.parametrize(
    ("offload", "autocast", "depth"),
    [
        (False, False, {}),
        (True, True, {}),
        (False, True, {"double_blocks": 1, "single_blocks": 0}),
        (True, False, {"double_blocks": 1, "single_blocks": 0}),
    ],
)
def test_gradients_are_those_of_plain_training(deterministic, offload, autocast, depth):
    model = transformer()
    arguments = inputs(model)
    calls = [Calls(model.double_blocks), Calls(model.single_blocks)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = gradients(model, arguments)
        held = Held() if offload else None
        with set_grad_checkpoint(model, depth=depth, others=OUTSIDE_BLOCKS, activations=held) as done:
            for _ in range(2):
                assert_same(gradients(model, arguments), expected)
    assert ("double_blocks.1" in done.paths) is not bool(depth)
    # Once plainly, and twice with two passes.
    assert [count.counts for count in calls] == ([[5, 3], [3, 3, 3]] if depth else [[5, 5], [5, 5, 5]])
    if held is not None:
        assert held.copied > 0


class AttentionCalls(TorchDispatchMode):
    """Counts forward passes of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_recomputes_no_attention(deterministic):
    model = transformer()
    arguments, blocks = inputs(model), len(model.double_blocks) + len(model.single_blocks)
    expected = gradients(model, arguments)
    for keep, times in ((False, 2), (True, 1)):
        with set_grad_checkpoint(model, others=OUTSIDE_BLOCKS, keep_attention=keep), AttentionCalls() as calls:
            assert_same(gradients(model, arguments), expected)
        assert calls.count == times * blocks


def test_a_batch_in_parts_with_offload(deterministic):
    model = transformer()
    batches = [inputs(model, seed=seed) for seed in range(2)]

    def accumulated() -> dict[str, Tensor]:
        model.zero_grad()
        losses = [
            model(*list(batch.values())[:1], **dict(list(batch.items())[1:])).square().mean() for batch in batches
        ]
        torch.stack(losses).sum().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    expected = accumulated()
    with set_grad_checkpoint(model, activations=Held()):
        assert_same(accumulated(), expected)


def test_without_gradients_nothing_is_held():
    model = transformer()
    arguments = inputs(model)
    held = Held()
    with set_grad_checkpoint(model, activations=held), torch.no_grad():
        model(*list(arguments.values())[:1], **dict(list(arguments.items())[1:]))
    assert held.copied == 0


def test_names_stay_and_everything_is_undone():
    model = transformer()
    names, attributes = list(model.state_dict()), [dict(vars(part)) for part in model.modules()]
    done = set_grad_checkpoint(model, True, 2, others=OUTSIDE_BLOCKS)
    assert list(model.state_dict()) == names
    assert done.paths == (
        *(f"double_blocks.{i}" for i in range(2)),
        *(f"single_blocks.{i}" for i in range(3)),
        "final_layer",
    )
    done.remove()
    done.remove()
    assert [dict(vars(part)) for part in model.modules()] == attributes


def test_a_copy_of_the_model_computes_for_itself(deterministic):
    model = transformer()
    arguments = inputs(model)
    with set_grad_checkpoint(model, activations=Held()):
        twin = copy.deepcopy(model)
        expected = gradients(model, arguments)
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert_same(gradients(twin, arguments), expected)


class TestSequences:
    @pytest.mark.parametrize(("gc_step", "offload"), [(1, True), (2, False), (3, True), (9, False)])
    def test_gradients_with_dropout(self, deterministic, gc_step, offload):
        torch.manual_seed(0)
        model, x = Stacked(), torch.randn(3, 6)
        expected = step(model, x)
        calls = Calls(model.blocks)
        held = Held() if offload else None
        set_grad_checkpoint(model, gc_step=gc_step, activations=held)
        assert_same(step(model, x), expected)
        assert calls.counts == [2] * 5
        if held is not None:
            # Two streams for each checkpoint of the blocks, one for each of the first layers but the first, whose input
            # the blocks take too; once the two tables and the shift.
            streams = 2 * ceil(5 / gc_step) + ceil(3 / gc_step) - 1
            assert held.copied == 4 * (streams * 18 + 6 + 6 + 1)

    def test_fewer_checkpoints_hold_less(self):
        model, x = Stacked(count=8, width=64), torch.randn(16, 64)

        def held_bytes(gc_step: int) -> int:
            with set_grad_checkpoint(model, gc_step=gc_step), TensorBytes() as counted:
                loss = model(x)
                held = counted.live_bytes
                loss.backward()
            return held

        sizes = [held_bytes(gc_step) for gc_step in (1, 2, 4)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[1] >= 4 * 2 * 16 * 64 * 4

    def test_depth_of_a_sequence(self):
        model, x = Stacked(), torch.randn(3, 6)
        calls = Calls(model.blocks)
        with set_grad_checkpoint(model, gc_step=2, depth={"blocks": 3}):
            step(model, x)
        assert calls.counts == [2, 2, 2, 1, 1]

    def test_a_list_and_a_sequential_of_its_own(self, deterministic):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        x = torch.randn(2, 4, requires_grad=True)

        def gradient(run) -> list[Tensor]:
            return list(torch.autograd.grad(run().square().sum(), [x, *layers.parameters()]))

        expected = gradient(lambda: layers(x))
        calls = Calls(layers)
        plain = gradient(lambda: auto_grad_checkpoint(list(layers), x))
        assert calls.counts == [1] * 4
        set_grad_checkpoint(layers, gc_step=2)
        for run in (lambda: auto_grad_checkpoint(layers, x), lambda: auto_grad_checkpoint(list(layers), x)):
            assert all(torch.equal(*pair) for pair in zip(gradient(run), expected, strict=True))
        assert calls.counts == [5] * 4
        assert all(torch.equal(*pair) for pair in zip(plain, expected, strict=True))

    def test_the_stack_of_a_transformer(self, deterministic):
        model = transformer(depth=4)
        latents, text, vector = torch.randn(1, 6, 32), torch.randn(1, 3, 32), torch.randn(1, 32)
        rotary = (torch.rand(1, 1, 9, 4), torch.rand(1, 1, 9, 4))
        expected = latents, text
        for block in model.double_blocks:
            expected = block(*expected, vector, rotary)
        set_grad_checkpoint(model, gc_step=2)
        outputs = auto_grad_checkpoint(model.double_blocks, latents, text, vector, rotary)
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


def test_one_module_is_checkpointed_by_its_call(deterministic):
    torch.manual_seed(0)
    block, x = Noisy(4), torch.randn(2, 4)
    arguments = (x, x, torch.ones(1))
    tables = {"pair": (torch.ones(4), torch.ones(4))}
    calls = Calls(nn.ModuleList([block]))

    def gradient() -> Tensor:
        torch.manual_seed(1)
        x, y = auto_grad_checkpoint(block, *arguments, tables=tables)
        return torch.autograd.grad((x * y).sum(), block.linear.weight)[0]

    plain = gradient()
    assert calls.counts == [1]
    with set_grad_checkpoint(block) as done:
        assert torch.equal(gradient(), plain)
    assert done.paths == ()
    assert calls.counts == [3]
    gradient()
    assert calls.counts == [4]


class TestFloat32Attention:
    @pytest.mark.parametrize("autocast", [False, True])
    def test_only_attention_is_in_fp32(self, autocast):
        seen = []

        def attention(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
            out = sdpa(q, k, v)
            seen.append({q.dtype, k.dtype, v.dtype, out.dtype, (q @ k.mT).dtype})
            return out

        model = transformer(attention=attention)
        model = model if autocast else model.to(torch.bfloat16)
        arguments = inputs(model)

        def dtypes(**options: object) -> list[set[torch.dtype]]:
            seen.clear()
            with (
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
                set_grad_checkpoint(model, True, **options) if options else torch.enable_grad(),
            ):
                gradients(model, arguments)
            return list(seen)

        assert dtypes() == [{torch.bfloat16}] * 5
        # Computed again in the same precision.
        assert dtypes(gc_step=1) == [{torch.float32}] * 10
        mixed = dtypes(depth={"double_blocks": 1, "single_blocks": 0})
        assert mixed == [{torch.float32}, *[{torch.bfloat16}] * 4, {torch.float32}]

    def test_fp32_attention_needs_attention(self):
        model = Stacked()
        with pytest.raises(ValueError, match="no checkpointed block has an attribute `attention`"):
            set_grad_checkpoint(model, True)
        # Nothing is half done.
        set_grad_checkpoint(model).remove()


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gc_step": 0}, "gc_step=0 must be at least 1"),
            ({"depth": {"double_block": 1}}, "MMDiT has no double_block; its stacks are double_blocks, single_blocks"),
            ({"depth": {"double_blocks": 3}}, "depth of 'double_blocks' is 3: use 0 to 2"),
            ({"depth": {"double_blocks": -1}}, "depth of 'double_blocks' is -1: use 0 to 2"),
            ({"others": ("last_layer",)}, "MMDiT has no last_layer"),
        ],
        ids=str,
    )
    def test_wrong_arguments_are_refused(self, options, message):
        model = transformer()
        with pytest.raises(ValueError, match=message):
            set_grad_checkpoint(model, **options)
        set_grad_checkpoint(model).remove()

    def test_checkpointing_twice_is_refused(self):
        model = transformer()
        done = set_grad_checkpoint(model)
        with pytest.raises(ValueError, match="is wrapped already"):
            set_grad_checkpoint(model)
        assert "forward" in vars(model.single_blocks[2])
        done.remove()
        assert "forward" not in vars(model.single_blocks[2])

    def test_a_replaced_forward_is_refused(self):
        model = transformer()
        model.single_blocks[0].forward = print
        with pytest.raises(ValueError, match=r"single_blocks\.0 is wrapped already"):
            set_grad_checkpoint(model)
        assert vars(model.single_blocks[0])["forward"] is print
        assert "forward" not in vars(model.double_blocks[0])
