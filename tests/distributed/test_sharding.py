"""Parameters in pieces over real processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from opensora_cli.checkpoint.sharding import model_gathering, model_sharding, record_model_param_shape, remove_padding


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1)).to(torch.bfloat16)
    model.register_parameter("scalar", nn.Parameter(torch.tensor(2.5), requires_grad=False))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    for parameter in (p for p in model.parameters() if p.ndim):
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def _shard_and_gather() -> tuple[list[int], dict[str, torch.Tensor]]:
    model = _model()
    shapes = record_model_param_shape(model)
    first = not dist.is_initialized() or dist.get_rank() == 0
    whole = {name: torch.full_like(p, -1.0) for name, p in model.named_parameters()} if first else {}
    model_sharding(model)
    lengths = [parameter.numel() for parameter in model.parameters()]
    model_gathering(model, shapes, whole)
    return lengths, whole


def test_pieces_come_together_again_on_the_first_rank(pool: Callable[[int], Any]) -> None:
    answers = pool(2).run(_shard_and_gather)
    model = _model()
    expected_lengths = [-(-parameter.numel() // 2) for parameter in model.parameters()]
    assert [lengths for lengths, _ in answers] == [expected_lengths] * 2
    gathered = answers[0][1]
    assert all(torch.equal(gathered[name], parameter) for name, parameter in model.named_parameters())
    assert all(whole == {} for _, whole in answers[1:])


def test_padding_is_removed() -> None:
    assert remove_padding(torch.arange(8), (2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
    assert remove_padding(torch.arange(4), ()).tolist() == [0]
