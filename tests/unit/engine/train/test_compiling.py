"""Blocks that run compiled: the same numbers under the same names, and a way out where compiling fails."""

from copy import deepcopy

import pytest
import torch
from tiny_transformer import assert_same, gradients, inputs, transformer
from torch import fx
from torch._dynamo.utils import counters

from opensora_cli.engine.train.transformer import compile_blocks
from opensora_cli.memory.checkpointing import set_grad_checkpoint


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _fails(graph: fx.GraphModule, examples: list[torch.Tensor]) -> None:
    raise RuntimeError("no compiler\nat all")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "checkpoints"), [("eager", True), ("aot_eager", False), ("aot_eager", True)])
def test_compiled_blocks_have_the_same_gradients_and_names(backend, checkpoints):
    plain = transformer()
    expected = gradients(plain, inputs(plain))
    model = transformer()
    names = list(model.state_dict())
    compile_blocks(model, warn=pytest.fail, backend=backend)
    if checkpoints:
        set_grad_checkpoint(model)
    found = gradients(model, inputs(model))
    assert list(model.state_dict()) == names
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)
    # One graph for each kind of block.
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_the_second_run_of_a_shape_compiles_nothing():
    model = transformer()
    compile_blocks(model, warn=pytest.fail, backend="aot_eager")
    gradients(model, inputs(model))
    before = counters["stats"]["unique_graphs"]
    gradients(model, inputs(model, seed=1))
    assert counters["stats"]["unique_graphs"] == before == 2


@pytest.mark.slow
def test_a_copy_is_compiled_too():
    model = transformer()
    compile_blocks(model, warn=pytest.fail, backend="aot_eager")
    gradients(deepcopy(model), inputs(model))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning_for_each_kind():
    plain = transformer()
    expected = gradients(plain, inputs(plain))
    model = transformer()
    warnings: list[str] = []
    compile_blocks(model, warn=warnings.append, backend=_fails)
    for _ in range(2):
        assert_same(gradients(model, inputs(model)), expected)
    assert len(warnings) == 2
    assert warnings[0].startswith("DoubleStreamBlock cannot be compiled and runs as it is: ")
    assert warnings[1].startswith("SingleStreamBlock cannot be compiled")
    assert "no compiler" in warnings[0]
    assert "\n" not in warnings[0]


def test_errors_of_the_block_itself_are_raised():
    model = transformer()
    compile_blocks(model, warn=lambda text: None, backend="eager")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.double_blocks[0](torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(1, 3), (torch.zeros(1),) * 2)


@pytest.mark.slow
def test_compiled_code_computes_the_same():
    plain = transformer()
    expected = gradients(plain, inputs(plain))
    model = transformer()
    compile_blocks(model, warn=pytest.fail)
    found = gradients(model, inputs(model))
    assert all(torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-5) for name in expected)
