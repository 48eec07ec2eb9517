"""Choice of the attention backend of a run, and what makes a backend usable."""

from dataclasses import replace

import pytest
import torch
from attention_libraries import fake_flash3, fake_xformers

from opensora_cli.core import attention as core_attention
from opensora_cli.core.attention import ATTENTION_KINDS
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.engine.components import attention
from opensora_cli.engine.components.attention import (
    AttentionUse,
    attention_stand_in,
    choose_attention,
    keep_attention,
    why_unusable,
)
from opensora_cli.engine.estimate.fake_tensors import fake_device
from opensora_cli.engine.estimate.transformer import fake_attention
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention import BACKENDS
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.devices import AttentionChoice

CPU = AttentionUse(device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=16)
GPU = replace(CPU, device=torch.device("cuda", 0))
SETTING = "runtime.attention"


@pytest.fixture(autouse=True)
def _tried_again():
    why_unusable.cache_clear()
    yield
    why_unusable.cache_clear()


@pytest.fixture
def on_cpu(monkeypatch):
    """Let the kernels of libraries be tried on the CPU, where their stand-ins compute."""
    for name, kind in ATTENTION_KINDS.items():
        monkeypatch.setitem(ATTENTION_KINDS, name, replace(kind, needs_gpu=False))


def choose(name, use=CPU, **options):
    return choose_attention(AttentionChoice(name), use, setting=SETTING, **options)


def test_auto_on_a_cpu_is_sdpa():
    plan = choose("auto")
    assert (plan.backend, plan.line()) == ("sdpa", "sdpa (auto: torch's fused kernels; the others need a GPU)")
    assert choose("math").line() == "math (as set)"


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("flash3", "flash_attn_3", "./flash-attention/hopper"),
        ("xformers", "xformers", "xformers"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(monkeypatch, name, package, install):
    monkeypatch.setattr(core_attention.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(HardwareError, match=f"{SETTING}={name} .*: {package} is not installed") as error:
        choose(name, GPU, tries_device=False)
    assert error.value.exit_code == 4
    assert install in error.value.hint


@pytest.mark.parametrize(("name", "fake"), [("flash3", fake_flash3), ("xformers", fake_xformers)])
@pytest.mark.usefixtures("on_cpu")
def test_a_backend_that_agrees_with_math_is_usable(monkeypatch, name, fake):
    library = fake(monkeypatch)
    for use in (CPU, replace(CPU, gradients=True)):
        assert why_unusable(name, use) is None
    assert choose(name).backend == name
    count = len(library.calls)
    assert choose(name).backend == name
    assert len(library.calls) == count, "it is tried once"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("scaled", "error"), [(0.5, r"\d+%"), (float("nan"), "inf%")])
def test_a_backend_with_other_results_is_refused(monkeypatch, scaled, error):
    fake_xformers(monkeypatch, scaled=scaled)
    with pytest.raises(HardwareError, match=rf"xformers does not work here: xformers differs from math by {error}"):
        choose("xformers")


@pytest.mark.usefixtures("on_cpu")
def test_a_backend_without_a_kernel_for_parts_is_unusable_in_a_ring():
    assert why_unusable("xformers", replace(CPU, in_parts=True)) == "xformers does not work in a ring"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gradients", [True, False])
def test_only_what_a_run_needs_is_tried(monkeypatch, gradients):
    """A build without a backward pass generates, and does not train."""
    fake_flash3(monkeypatch)
    import flash_attn_interface

    attend = flash_attn_interface.flash_attn_func

    def without_backward(q, k, v, softmax_scale, causal, deterministic):
        if q.requires_grad:
            raise RuntimeError("This build has no such kernel.\nSee the log.")
        return attend(q, k, v, softmax_scale=softmax_scale, causal=causal)

    monkeypatch.setattr(flash_attn_interface, "flash_attn_func", without_backward)
    expected = "flash3: This build has no such kernel. See the log."
    assert why_unusable("flash3", replace(CPU, gradients=gradients)) == (expected if gradients else None)


LIBRARIES = {"flash3", "xformers", "cudnn", "sdpa"}


@pytest.mark.parametrize(
    ("capability", "works", "backend"),
    [
        ((9, 0), LIBRARIES, "flash3"),
        ((9, 0), LIBRARIES - {"flash3"}, "sdpa"),
        ((8, 0), LIBRARIES, "sdpa"),
        ((10, 0), {"cudnn", "sdpa"}, "sdpa"),
    ],
)
def test_auto_uses_the_first_backend_of_the_order_that_works(monkeypatch, capability, works, backend):
    tried = gpu_on_which(monkeypatch, works, capability=capability)
    plan = choose("auto", GPU)
    assert plan.backend == tried[-1] == backend
    assert plan.reason.startswith("auto: ")
    assert [name for name in tried if f"{name} fails" in plan.reason] == tried[:-1]
    assert "cudnn" not in tried


def gpu_on_which(monkeypatch, works, *, capability):
    """Fake a GPU on which only the backends `works` agree with math; return the list of those that are tried."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    tried = []

    def why(name, use):
        tried.append(name)
        return None if name in works else f"{name} fails"

    monkeypatch.setattr(attention, "why_unusable", why)
    return tried


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("math", "math (auto: the backend of the run that this one continues)"),
        ("sdpa", choose("auto").line()),
        ("xformers", choose("auto").line()),
        ("flash9", choose("auto").line()),
        (None, choose("auto").line()),
    ],
)
def test_a_continued_run_keeps_its_backend_if_it_works(before, line):
    assert keep_attention(choose("auto"), before, CPU).line() == line


def test_a_process_that_starts_ranks_uses_no_device(monkeypatch):
    fake_xformers(monkeypatch)
    monkeypatch.setattr(attention, "why_unusable", lambda name, use: pytest.fail("tried"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("asked"))
    # Devices of a machine that is only planned for are not tried either.
    assert choose("auto", GPU).backend == "sdpa"
    assert choose("xformers", GPU, tries_device=False).line() == "xformers (as set)"
    assert choose("auto", GPU, tries_device=False).line() == "sdpa (auto: unless the device has a faster one)"


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(ring=2), MeshShape(ulysses=2)])
def test_estimates_count_the_scores_of_backends_that_are_not_fused(mesh):
    tokens, scores = 512, 4 * 512 * 512 * 4

    def peak(name):
        with fake_device("cpu") as device:
            attend = fake_attention(mesh, attention_stand_in(name))
            given = [torch.empty(1, 4, tokens, 16, device=device) for _ in range(3)]
            with TensorBytes() as counter, torch.inference_mode():
                attend(*given)
        return counter.peak_bytes

    assert peak("math") >= peak("sdpa") + scores
    assert peak("auto") == peak("flash3") == peak("xformers") == peak("sdpa")
    assert attention_stand_in("bf16_products") is BACKENDS["bf16_products"]
