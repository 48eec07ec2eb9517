"""Compiled blocks: the same numbers and names, and uncompiled blocks if compiling fails."""

import gc
import getpass
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tiny_transformer import assert_same, gradients, inputs, linears_of_blocks, transformer
from torch import fx
from torch._dynamo.utils import counters

from opensora_cli.engine.components import compiled
from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.memory.checkpointing import set_grad_checkpoint
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.attention.torch_kernels import math
from opensora_cli.models.linears import LowRankLinear


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    compiled._compiled_class.cache_clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def velocity(model, **sizes):
    given = inputs(model, batch=1, **sizes)
    with torch.inference_mode():
        return model(given.pop("packed_latents_BND"), **given)


def _fails(graph: fx.GraphModule, examples: list[torch.Tensor]) -> None:
    raise RuntimeError("no compiler\nat all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "checkpoints", "rtol"),
    [("eager", True, 1e-4), ("aot_eager", False, 1e-4), ("aot_eager", True, 1e-4), ("inductor", False, 1e-3)],
)
def test_compiled_blocks_have_the_same_gradients_and_names(backend, checkpoints, rtol):
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
    assert all(torch.allclose(found[name], expected[name], rtol=rtol, atol=rtol / 100) for name in expected)
    # One graph for each kind of block, and none for a second run.
    gradients(model, inputs(model, seed=1))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_a_failed_compiler_leaves_blocks_uncompiled_with_one_warning_for_each_kind():
    plain = transformer()
    expected = gradients(plain, inputs(plain))
    model = transformer()
    warnings: list[str] = []
    compile_blocks(model, warn=warnings.append, backend=_fails)
    for _ in range(2):
        assert_same(gradients(model, inputs(model)), expected)
    assert len(warnings) == 2
    assert warnings[0].startswith("DoubleStreamBlock cannot be compiled and runs uncompiled: ")
    assert warnings[1].startswith("SingleStreamBlock cannot be compiled")
    assert "no compiler" in warnings[0]
    assert "\n" not in warnings[0]


class _Untraceable:
    """Attention that the compiler cannot trace, like that of several ranks."""

    def __init__(self):
        self.calls = 0

    def __call__(self, q, k, v):
        self.calls += 1
        torch._dynamo.graph_break()
        return math(q, k, v)


@pytest.mark.slow
def test_seeds_prompts_sizes_and_reloading_compile_nothing_after_the_second_size(caplog):
    plain, first = transformer(), transformer()
    compile_blocks(first, warn=pytest.fail, backend="eager")
    for seed in range(3):
        torch.testing.assert_close(velocity(first, seed=seed), velocity(plain, seed=seed))
    assert graphs() == 2
    # The second size compiles graphs for all sizes.
    for tokens in (20, 30, 12, 25):
        torch.testing.assert_close(velocity(first, tokens=tokens), velocity(plain, tokens=tokens))
        assert graphs() == 4
    weights = [weakref.ref(weight) for weight in first.parameters()]
    del first
    caplog.clear()  # the compiler's traces
    gc.collect()
    assert not any(weight() is not None for weight in weights), "compiled code holds no weights"
    second = transformer()
    compile_blocks(second, warn=pytest.fail, backend="eager")
    torch.testing.assert_close(velocity(second), velocity(plain))
    assert graphs() == 4


@pytest.mark.slow
def test_untraceable_attention_breaks_no_graph_and_can_change():
    plain, model = transformer(attention=math), transformer()
    compile_blocks(model, warn=pytest.fail, backend="eager")
    for seed in range(2):
        attention = _Untraceable()
        model.set_attention(attention)
        assert model.double_blocks[0].attention is attention
        torch.testing.assert_close(velocity(model, seed=seed), velocity(plain, seed=seed))
        assert attention.calls == 5
        assert graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_streamed_blocks_with_adapters_are_one_graph_of_each_kind(fp8):
    models = transformer(), transformer()
    for model in models:
        if fp8:
            for block in (*model.double_blocks, *model.single_blocks):
                store_in_fp8(block)
        generator = torch.Generator().manual_seed(3)
        for path in linears_of_blocks(model.config):
            base = model.get_submodule(path)
            low = torch.randn(2, base.in_features, generator=generator), torch.randn(base.out_features, 2)
            model.set_submodule(path, LowRankLinear(base, low[0], low[1].zero_() + 0.01))
    plain, model = models
    compile_blocks(model, warn=pytest.fail, backend="aot_eager")
    stacks = [model.double_blocks, model.single_blocks]
    with stream_blocks(stacks, device="cpu", resident=2) as figures:
        for seed in range(2):
            torch.testing.assert_close(velocity(model, seed=seed), velocity(plain, seed=seed))
    assert figures.copied_bytes > 0
    assert graphs() == 2


@pytest.mark.slow
def test_chunks_of_tokens_run_uncompiled_with_one_warning_for_each_kind():
    plain, model, warnings = transformer(), transformer(), []
    compile_blocks(model, warn=warnings.append, backend="eager")
    for size in (7, 5, None):
        for each in (plain, model):
            each.set_sequence_chunk(size)
        torch.testing.assert_close(velocity(model, tokens=16), velocity(plain, tokens=16))
        assert graphs() == (2 if size is None else 0)
    assert [warning.split(":")[0] for warning in warnings] == [
        f"{kind} runs uncompiled, {size} tokens at a time"
        for size in (7, 5)
        for kind in ("DoubleStreamBlock", "SingleStreamBlock")
    ]


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)
def test_too_many_sizes_run_uncompiled_with_one_warning():
    plain, model = transformer(single=0), transformer(single=0)
    warnings = []
    compile_blocks(model, warn=warnings.append, backend="aot_eager_decomp_partition")
    for tokens in (12, 13, 14):
        torch.testing.assert_close(velocity(model, tokens=tokens), velocity(plain, tokens=tokens))
    [warning] = warnings
    assert warning.startswith("DoubleStreamBlock cannot be compiled and runs uncompiled: ")


COMPILE = """
import sys
import torch
from opensora_cli.engine.components.compiled import compile_blocks
from tiny_transformer import inputs, linears_of_blocks, transformer
torch.set_num_threads(1)
model = transformer()
compile_blocks(model, warn=lambda text: sys.exit(text))
given = inputs(model, batch=1)
with torch.inference_mode():
    model(given.pop("packed_latents_BND"), **given)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no modes of this kind")
@pytest.mark.parametrize("case", ["private", "writable by others", "no home"])
def test_compiled_code_lies_where_this_account_alone_may_write(case, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "osora" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if case == "writable by others":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    elif case == "no home":
        monkeypatch.setattr(compiled, "user_cache", lambda kind: None)
    found = compiled._private_folder.__wrapped__()
    assert found.stat().st_mode & 0o777 == 0o700
    assert (found == folder) is (case == "private")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.skipif(sys.platform == "win32", reason="torch compiles for CPUs with another compiler there")
def test_compiled_code_is_kept_in_private_folders_alone(tmp_path):
    temporary, working, cache = tmp_path / "temporary", tmp_path / "working", tmp_path / "cache"
    # The folder that torch would use.
    theirs = temporary / f"torchinductor_{getpass.getuser()}"
    theirs.mkdir(parents=True)
    working.mkdir()
    (working / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "program.py").write_text(COMPILE)
    unset = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, cwd=working, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    assert list(theirs.iterdir()) == []
    compiled = cache / "osora" / "compiled"
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert list(compiled.rglob("*.so"))
    assert list(compiled.rglob("*.gch"))
