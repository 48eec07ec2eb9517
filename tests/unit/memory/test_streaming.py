"""Block streaming: the numbers of a whole model, from a few blocks' memory, whatever happens on the way."""

import gc
import threading
import weakref

import late_stream
import pytest
import torch
from closeness import assert_close
from mapped_memory import are_mapped, needs_maps
from safetensors.torch import save_file
from tiny_transformer import inputs, transformer
from torch import nn

from opensora_cli.checkpoint.load import load_into_module
from opensora_cli.memory import host_weights, streaming
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.host_weights import slot_bytes, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.blocks import modulation_layers, repeated_blocks
from opensora_cli.models.mmdit.model import KnownInputs, MMDiT

pytestmark = pytest.mark.usefixtures("no_gradients")

DOUBLE, SINGLE = 3, 4
BLOCKS = DOUBLE + SINGLE
SOURCES = ["pinned", "mapped"]


def frozen_model():
    return transformer(depth=DOUBLE, single=SINGLE).requires_grad_(False).eval()


def empty_model():
    config = frozen_model().config
    with torch.device("meta"):
        return MMDiT(config).requires_grad_(False).eval()


def stacks(model):
    return [model.get_submodule(stack.module_path) for stack in repeated_blocks(model.config)]


def blocks_of(model):
    return [block for stack in stacks(model) for block in stack]


def velocity(model, seed=0):
    return model(**inputs(model, seed=seed))


@pytest.fixture
def model():
    return frozen_model()


@pytest.fixture(scope="module")
def expected():
    """Of seeds 0 to 3."""
    model = frozen_model()
    with torch.no_grad():
        return [velocity(model, seed) for seed in range(4)]


def hooks_of(model):
    """What follows calls of blocks."""
    return [hook for block in blocks_of(model) for hook in (*block._forward_hooks, *block._forward_pre_hooks)]


def check_as_before(model, hooks=()):
    """All weights are there, on the CPU, under their names and with their values; nothing but `hooks` follows calls."""
    state, original = model.state_dict(), frozen_model().state_dict()
    assert list(state) == list(original)
    assert all(torch.equal(state[key], original[key]) for key in state)
    assert hooks_of(model) == list(hooks)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


class TestNumbersAndBytes:
    @pytest.mark.parametrize(
        ("resident", "source"),
        [
            (1, "pinned"), (2, "mapped"), (2, "pinned"), (3, "mapped"), (BLOCKS - 1, "pinned"), (BLOCKS, "mapped"),
            (BLOCKS + 3, "pinned"),
        ],
    )  # fmt: skip
    def test_every_pass_equals_the_resident_model_within_the_planned_bytes(self, model, expected, resident, source):
        sizes = [slot_bytes(block) for block in blocks_of(model)]
        # Which blocks stay is seen from outside: it is those that are not copied again.
        with stream_blocks(stacks(model), device="cpu", resident=resident, source=source) as figures:
            copied = []
            for seed in range(4):
                before = figures.copied_bytes
                assert torch.equal(velocity(model, seed), expected[seed])
                copied.append(figures.copied_bytes - before)
        assert figures.device_bytes == streaming_bytes(sizes, resident=resident)
        if resident >= BLOCKS:
            assert figures.device_bytes == figures.copied_bytes == sum(sizes)
            assert copied == [0, 0, 0, 0]
            assert figures.host_bytes <= 2 * 4096
        else:
            slots = min(resident, 2)
            kept_bytes = figures.device_bytes - slots * max(sizes)
            assert set(copied) == {sum(sizes) - kept_bytes}
            if source == "pinned":
                streamed = BLOCKS - (resident - slots)
                assert sum(copied[:1]) <= figures.host_bytes < sum(copied[:1]) + streamed * 4096
        check_as_before(model)


class TestOrder:
    @pytest.mark.parametrize(("resident", "source"), [(1, "mapped"), (2, "pinned"), (3, "mapped"), (4, "pinned")])
    def test_blocks_in_any_order_equal_resident_ones(self, model, resident, source):
        blocks, plain = (transformer(single=8).requires_grad_(False).single_blocks for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        tokens, vector = torch.randn(1, 5, 32, generator=generator), torch.randn(1, 32, generator=generator)
        rotary = model.rotary_table(torch.arange(15).view(1, 5, 3), text_length=0)
        orders = [range(8), reversed(range(8)), [0, 0, 1, 1], [0, 2, 4, 6], [7, 3, 3, 0, 5, 1], [0, 1, 7], range(8)]
        with stream_blocks([blocks], device="cpu", resident=resident, source=source):
            for order in orders:
                for index in order:
                    streamed = blocks[index](tokens, vector, rotary)
                    assert torch.equal(streamed, plain[index](tokens, vector, rotary)), index


class Tied(nn.Module):
    """Two names for one weight, a weight of other dtypes, an empty and a scalar one, and buffers that change."""

    def __init__(self, shared):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.shared = shared
        self.short = nn.Parameter(torch.randn(6).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.second(self.first(x))) + self.shared * self.short + self.scalar.float()
        return x + self.transposed[:, 1] + self.empty.sum()


@pytest.mark.parametrize(("resident", "source"), [(1, "pinned"), (2, "mapped"), (3, "pinned"), (4, "mapped")])
def test_tied_weights_and_buffers_stay_tied_and_change(source, resident):
    def build():
        torch.manual_seed(3)
        shared = nn.Parameter(torch.randn(6))
        return nn.ModuleList(Tied(shared) for _ in range(4))

    plain, streamed = build(), build()
    x = torch.randn(7, 6)
    with stream_blocks([streamed], device="cpu", resident=resident, source=source):
        for _ in range(3):
            assert torch.equal(nn.Sequential(*streamed)(x), nn.Sequential(*plain)(x))
    for block, same in zip(streamed, plain, strict=True):
        assert block.second.weight is block.first.weight
        assert block.calls == 3
        assert torch.equal(block.norm.running_mean, same.norm.running_mean)
    if resident in (1, 2):
        assert len({id(block.shared) for block in streamed}) == 1


@pytest.mark.parametrize(("resident", "source"), [(2, "pinned"), (2, "mapped")])
def test_layers_that_are_left_out_stay_where_they_are(model, resident, source):
    layers = [model.get_submodule(path) for path in modulation_layers(model.config)]
    weights = [id(layer.weight) for layer in layers]
    whole = streaming_bytes([slot_bytes(block) for block in blocks_of(model)], resident=resident)
    given = inputs(model)
    known = KnownInputs(model.modulation_of(given["timesteps_B"], given["pooled_prompt_embeds_BV"]))
    with stream_blocks(stacks(model), device="cpu", resident=resident, source=source, without=layers) as figures:
        assert_close(model(**given, known=known), velocity(frozen_model()))
        assert [id(layer.weight) for layer in layers] == weights
    assert figures.device_bytes < 0.85 * whole
    check_as_before(model)


class TestInterruptions:
    @pytest.mark.parametrize(
        ("where", "error", "source"),
        [
            ("double_blocks.0", KeyboardInterrupt, "pinned"),
            ("double_blocks.2", ValueError, "mapped"),
            ("single_blocks.1", torch.OutOfMemoryError, "pinned"),
            ("single_blocks.3", KeyboardInterrupt, "mapped"),
        ],
    )
    def test_an_error_inside_a_pass_leaves_all_weights_in_place(self, model, expected, error, source, where):
        def fail(_module, _inputs):
            raise error("now")

        def weights():
            return [id(weight) for weight in model.parameters()]

        inner = next(iter(model.get_submodule(where).children()))
        with stream_blocks(stacks(model), device="cpu", resident=3, source=source):
            before = weights()
            hook = inner.register_forward_pre_hook(fail)
            with pytest.raises(error, match="now"):
                velocity(model)
            hook.remove()
            # Hooks do not run for what is no Exception: then the next block that is called restores the weights.
            assert weights() == before or error is KeyboardInterrupt
            assert torch.equal(velocity(model, 1), expected[1])
            assert weights() == before
            assert torch.equal(velocity(model, 2), expected[2])
        check_as_before(model)
        assert weights() == before

    def test_an_error_of_the_reading_thread_is_raised_and_the_next_pass_is_right(self, model, expected, monkeypatch):
        copy_piece = host_weights._MappedWeights._copy_piece
        failing = threading.Event()

        def copy_or_fail(self, *tensors):
            assert threading.current_thread() is not threading.main_thread()
            if failing.is_set():
                raise OSError("the disk is gone")
            copy_piece(self, *tensors)

        monkeypatch.setattr(host_weights._MappedWeights, "_copy_piece", copy_or_fail)
        failing.set()
        with stream_blocks(stacks(model), device="cpu", resident=2, source="mapped"):
            for seed in (0, 1):
                with pytest.raises(OSError, match="the disk is gone"):
                    velocity(model)
                failing.clear()
                # First the same block is asked for again, then one after others.
                assert torch.equal(velocity(model, seed), expected[seed])
                failing.set()
        check_as_before(model)

    @pytest.mark.parametrize(("at_most", "source"), [(3, "mapped"), (4, "pinned")])
    def test_errors_hold_no_memory(self, model, monkeypatch, source, at_most):
        """Neither at the start nor in a pass, although an exception keeps the frames of its traceback."""
        made = []

        def run(nbytes, device):
            if len(made) == at_most:
                raise torch.OutOfMemoryError("no more")
            made.append(weakref.ref(memory := torch.empty(nbytes, dtype=torch.uint8, device=device)))
            return memory

        monkeypatch.setattr(streaming, "_run", run)
        model.requires_grad_(True)
        with (
            torch.enable_grad(),
            pytest.raises(RuntimeError) as caught,
            stream_blocks(stacks(model), device="cpu", resident=4, source=source),
        ):
            velocity(model)
        check_as_before(model)
        assert ("no more" if at_most == 3 else "no gradients") in str(caught.value)
        assert [memory() for memory in made] == [None] * at_most
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("resident", [1, 3])
def test_each_copy_is_waited_for_before_its_block_computes(model, expected, monkeypatch, resident):
    made = late_stream.install(monkeypatch)
    with stream_blocks(stacks(model), device="cpu", resident=resident):
        for seed in range(4):
            assert torch.equal(velocity(model, seed), expected[seed])
        # The next pass is prefetched.
        assert len(made[0].queued) - made[0].done == min(resident, 2)
    assert made[0].done == len(made[0].queued)
    check_as_before(model)


class TestModes:
    @pytest.mark.parametrize("source", SOURCES)
    def test_all_inside_inference_mode(self, expected, source):
        with torch.inference_mode():
            model = frozen_model()
            assert model.img_in.weight.is_inference()
            with stream_blocks(stacks(model), device="cpu", resident=3, source=source):
                for seed in range(3):
                    assert torch.equal(velocity(model, seed), expected[seed])
            assert torch.equal(velocity(model, 3), expected[3])
            check_as_before(model)

    def test_weights_that_want_gradients_are_refused_where_these_are_recorded(self, model, expected):
        model.requires_grad_(True)
        with stream_blocks(stacks(model), device="cpu", resident=3):
            with torch.enable_grad(), pytest.raises(RuntimeError, match="weights that are streamed get no gradients"):
                velocity(model)
            assert torch.equal(velocity(model), expected[0])
        assert all(weight.requires_grad for weight in model.parameters())

    @pytest.mark.parametrize(
        ("build", "resident", "message"),
        [(frozen_model, 0, "resident=0 is not positive"), (empty_model, 2, "blocks on the meta device")],
    )
    def test_what_cannot_be_streamed_is_refused(self, build, resident, message):
        with (
            pytest.raises(ValueError, match=message),
            stream_blocks(stacks(build()), device="cpu", resident=resident),
        ):
            pytest.fail("not reached")


class TestHostMemory:
    def test_the_pinned_copy_is_the_only_one(self, model):
        originals = [weakref.ref(weight) for block in blocks_of(model) for weight in block.parameters()]
        streamed_bytes = sum(slot_bytes(block) for block in blocks_of(model))
        bare_bytes = sum(weight.nbytes for block in blocks_of(model) for weight in block.parameters())
        with TensorBytes() as counted:
            counted.add(model)
            before = counted.live_bytes
            with stream_blocks(stacks(model), device="cpu", resident=1, source="pinned") as figures:
                gc.collect()
                assert not [weight for weight in originals if weight() is not None]
                held = counted.live_bytes - figures.device_bytes
                # Weights begin at multiples of 512 bytes, blocks with a page.
                spare = streamed_bytes - bare_bytes + BLOCKS * 2 * 4096
                assert before <= held <= before + spare
                # Made block by block: two copies of one at a time.
                assert counted.peak_bytes <= before + spare + max(slot_bytes(block) for block in blocks_of(model))
                assert streamed_bytes <= figures.host_bytes <= streamed_bytes + BLOCKS * 4096

    @needs_maps
    def test_mapped_weights_stay_in_their_file(self, tmp_path, expected):
        path = tmp_path / "weights.safetensors"
        save_file(frozen_model().state_dict(), path)
        model = empty_model()
        load_into_module(model, path, device="cpu", dtype=torch.float32)

        weights = [weight for block in blocks_of(model) for weight in block.parameters()]
        assert are_mapped(weights, path)
        hooks = hooks_of(model)  # which look at the file
        with stream_blocks(stacks(model), device="cpu", resident=3, source="mapped") as figures:
            assert torch.equal(velocity(model), expected[0])
        after = [weight for block in blocks_of(model) for weight in block.parameters()]
        assert all(weight is same for weight, same in zip(after, weights, strict=True))
        largest = max(weight.nbytes for weight in weights)
        assert figures.host_bytes == 2 * (-(-largest // 4096) * 4096)
        check_as_before(model, hooks)
