"""Operations and bytes of real modules, counted on fake tensors."""

import pytest
import torch
from tiny_transformer import transformer
from torch import nn
from torch.nn import functional

from opensora_cli.engine.estimate import transformer as transformer_work
from opensora_cli.engine.estimate.fake_tensors import Work, WorkCounter, fake_device, fake_module, repeat_calls
from opensora_cli.engine.estimate.generation import text_work
from opensora_cli.engine.estimate.transformer import evaluation_work
from opensora_cli.models.text.sizes import ClipSizes, T5Sizes
from opensora_cli.parallel.shares import MeshShape

BF16 = torch.bfloat16
CONFIG = transformer().config.replace(
    {"hidden_size": 64, "num_heads": 4, "axes_dim": (8, 4, 4), "depth": 2, "depth_single_blocks": 3}
)


def test_products_convolutions_and_attention_are_counted_apart() -> None:
    with fake_device("cuda") as device:
        linear = fake_module(lambda: nn.Linear(6, 10), device=device, dtype=BF16)
        convolution = fake_module(lambda: nn.Conv3d(2, 4, 3), device=device, dtype=BF16)
        rows = torch.empty(5, 6, dtype=BF16, device=device)
        clip = torch.empty(1, 2, 3, 4, 5, dtype=BF16, device=device)
        query, key = (torch.empty(1, 2, tokens, 8, dtype=BF16, device=device) for tokens in (7, 9))
        with WorkCounter() as counter:
            linear(rows)
            assert counter.work == Work(2 * 5 * 6 * 10, 0, 2 * (5 * 6 + 6 * 10 + 10 + 5 * 10), 0, 1)
            convolution(clip)
            assert counter.work.product_flops == 2 * 5 * 6 * 10 + 2 * (4 * 1 * 2 * 3) * (2 * 27)
            functional.scaled_dot_product_attention(query, key, key)
            assert counter.work.attention_flops == 2 * 2 * 7 * 9 * (8 + 8)
            before = counter.work
            rows.view(6, 5).t()
            rows.new_empty(100)
            assert counter.work == before
            rows.add(rows[:1])
            assert counter.work - before == Work(traffic_bytes=2 * (30 + 6 + 30), kernels=1)


def test_repeated_work_is_run_once_for_each_shape() -> None:
    with fake_device("cuda") as device:
        linear = fake_module(lambda: nn.Linear(6, 6), device=device, dtype=BF16)
        ran: list[int] = []
        run = linear.forward
        linear.forward = lambda rows: ran.append(1) or run(rows)
        counter = WorkCounter()
        repeat_calls(linear, work=counter)
        with counter:
            linear(torch.empty(5, 6, dtype=BF16, device=device))
            linear(torch.empty(5, 6, dtype=BF16, device=device))
            assert len(ran) == 1
            assert counter.work.product_flops == 2 * (2 * 5 * 6 * 6)
            assert counter.work.kernels == 2
            linear(torch.empty(7, 6, dtype=BF16, device=device))
            assert len(ran) == 2


def test_one_block_of_each_stack_represents_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few = evaluation_work(CONFIG, 40, 8, BF16)
    evaluation_work.cache_clear()
    monkeypatch.setattr(transformer_work, "repeat_calls", lambda *_, **__: None)
    assert evaluation_work(CONFIG, 40, 8, BF16) == few
    evaluation_work.cache_clear()


@pytest.mark.parametrize("mesh", [MeshShape(ring=2), MeshShape(ulysses=2), MeshShape(ring=2, ulysses=2)], ids=str)
def test_ranks_share_products_and_attention(mesh: MeshShape) -> None:
    alone, shared = evaluation_work(CONFIG, 64, 8, BF16), evaluation_work(CONFIG, 64, 8, BF16, mesh)
    assert shared.attention_flops == pytest.approx(alone.attention_flops / mesh.size)
    # Modulation is computed by each.
    assert shared.product_flops == pytest.approx(alone.product_flops / mesh.size, rel=0.1)


def test_tensor_parallel_ranks_share_what_is_inside_blocks() -> None:
    alone = evaluation_work(CONFIG, 64, 8, BF16)
    shared = evaluation_work(CONFIG, 64, 8, BF16, MeshShape(tensor=2))
    assert shared.attention_flops == alone.attention_flops / 2
    assert alone.product_flops / 2 < shared.product_flops < 0.6 * alone.product_flops


def test_text_encoders_multiply_each_weight_once_a_token() -> None:
    t5, clip = T5Sizes(), ClipSizes()
    work = text_work(t5, clip, (512, 77), 2, prompts=1)
    assert work.product_flops == pytest.approx(2 * 512 * (t5.parameters - 32_128 * 4096), rel=0.02)
    assert text_work(t5, clip, (512, 77), 2) == work * 2
