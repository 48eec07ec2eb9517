"""What a step computes with, and the scale of float16's loss."""

import pytest
import torch
from torch import nn

from opensora_cli.engine.train.precision import Precision
from opensora_cli.settings.train_loop import PrecisionSettings

CPU = torch.device("cpu")


def precision(compute: str, **settings: object) -> Precision:
    return Precision(PrecisionSettings(compute=compute, **settings), CPU)


class TestPrecision:
    @pytest.mark.parametrize(
        ("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
    )
    def test_layers_compute_as_chosen_and_weights_stay(self, compute, dtype):
        layer = nn.Linear(4, 4)
        chosen = precision(compute)
        with chosen.autocast():
            result = layer(torch.ones(2, 4))
        assert (chosen.dtype, result.dtype, layer.weight.dtype) == (dtype, dtype, torch.float32)
        result.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32

    def test_only_fp16_scales(self):
        for compute in ("fp32", "bf16"):
            chosen = precision(compute)
            loss = torch.tensor(3.0)
            assert chosen.scale(loss) is loss
            chosen.update(skipped=True)
            assert (chosen.may_overflow, chosen.figures(), chosen.state_dict()) == (False, {}, {})

    def test_small_gradients_survive_in_fp16(self):
        # 2^-26 is below the smallest float16; scaled by 2^16 it is not.
        layer = nn.Linear(1, 1, bias=False)
        gradients = {}
        for compute in ("fp16", "bf16"):
            chosen = precision(compute)
            layer.weight.grad = None
            with chosen.autocast():
                loss = layer(torch.ones(1, 1)).float().sum() * 2**-26
            chosen.scale(loss).backward()
            chosen.unscale(layer)
            gradients[compute] = layer.weight.grad.item()
        assert gradients["fp16"] == gradients["bf16"] == 2**-26

    def test_the_scale_halves_when_skipped_and_doubles_after_a_while(self):
        chosen = precision("fp16", initial_loss_scale=8.0, loss_scale_window=3)
        scales = []
        for skipped in (False, False, True, False, False, False, False):
            chosen.update(skipped=skipped)
            scales.append(chosen.figures()["loss_scale"])
        assert scales == [8, 8, 4, 4, 4, 8, 8]

    def test_it_never_falls_below_one(self):
        chosen = precision("fp16", initial_loss_scale=2.0)
        seen = []
        for _ in range(3):
            seen.append(chosen.may_overflow)
            chosen.update(skipped=True)
        assert seen == [True, False, False]
        assert chosen.figures() == {"loss_scale": 1.0}

    def test_its_state_goes_on(self):
        first = precision("fp16", initial_loss_scale=8.0, loss_scale_window=2)
        first.update(skipped=True)
        first.update(skipped=False)
        second = precision("fp16", loss_scale_window=2)
        second.load_state_dict(first.state_dict())
        second.update(skipped=False)
        assert second.figures() == {"loss_scale": 8.0}

    def test_from_a_state_without_scale_it_begins_anew(self):
        chosen = precision("fp16", initial_loss_scale=8.0)
        chosen.load_state_dict(precision("bf16").state_dict())
        assert chosen.figures() == {"loss_scale": 8.0}
