"""Linear layers that multiply in 8 bits. Their arithmetic works on a CPU too, although slowly."""

import pytest
import torch
from torch import nn

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.engine.train.fp8_linear import Fp8TrainLinear, require_fp8, use_fp8_linears


def layer(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 48, bias=bias)


def features() -> torch.Tensor:
    # 2 x 5 rows, no multiple of 16, and far from the range of 8 bits.
    return torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).mul(1e4).requires_grad_()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


class TestRequireFp8:
    def test_a_cpu_is_refused(self):
        with pytest.raises(HardwareError, match=r"precision\.fp8_linears=true needs an NVIDIA GPU") as raised:
            require_fp8(torch.device("cpu"))
        assert raised.value.exit_code == 4

    def test_an_older_gpu_is_refused(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
        with pytest.raises(HardwareError, match=r"capability 8\.9, and RTX 3090 has 8\.6"):
            require_fp8(torch.device("cuda"))

    @pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
    def test_newer_ones_are_not(self, monkeypatch, capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        require_fp8(torch.device("cuda"))


class TestUseFp8Linears:
    def test_the_named_layers_and_no_others(self):
        module = nn.ModuleDict({"block": nn.Sequential(layer(), nn.Linear(48, 16)), "out": nn.Linear(16, 3)})
        before = dict(module.named_parameters())
        use_fp8_linears(module, ["block.0", "block.1"])
        assert [type(linear) for linear in (*module["block"], module["out"])] == [Fp8TrainLinear] * 2 + [nn.Linear]
        after = dict(module.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)

    def test_sizes_that_the_hardware_cannot_multiply(self):
        with pytest.raises(RequestError, match=r"multiples of 16, and out is 16 x 3"):
            use_fp8_linears(nn.ModuleDict({"out": nn.Linear(16, 3)}), ["out"])


class TestFp8TrainLinear:
    @pytest.mark.parametrize("bias", [True, False])
    def test_near_the_exact_layer(self, bias):
        exact, rounded = layer(bias=bias), Fp8TrainLinear(layer(bias=bias))
        results = []
        for linear in (exact, rounded):
            given = features()
            output = linear(given)
            (output * torch.arange(48.0)).sum().backward()
            results.append((output, given.grad, *(weight.grad for weight in linear.parameters())))
        for expected, found in zip(*results, strict=True):
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype == torch.float32
            assert error(found, expected) < 0.1
        # It did round.
        assert error(results[1][0], results[0][0]) > 1e-3

    def test_numbers_of_8_bits_are_multiplied_exactly(self):
        linear = layer(bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.arange(48 * 32).view(48, 32) % 15 - 7.0)
            linear.weight[0, 0] = 448.0
        given = torch.full((16, 32), 2.0)
        # A scale that is no power of two is rounded, on some CPUs before the sums.
        torch.testing.assert_close(Fp8TrainLinear(linear)(given), given @ linear.weight.t(), rtol=1e-6, atol=1e-4)

    def test_under_autocast_it_gives_what_a_layer_gives(self):
        linear = Fp8TrainLinear(layer())
        given = features()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = linear(given)
        output.sum().backward()
        assert (output.dtype, given.grad.dtype, linear.weight.grad.dtype) == (
            torch.bfloat16,
            torch.float32,
            torch.float32,
        )

    def test_zeros_stay_zero_and_what_is_not_finite_stays_so(self):
        linear = Fp8TrainLinear(layer(bias=False))
        assert torch.equal(linear(torch.zeros(3, 32)), torch.zeros(3, 48))
        assert not linear(torch.full((1, 32), float("inf"))).isfinite().any()
