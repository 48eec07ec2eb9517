"""Names of parallelism that need no ranks; those that do are in tests/distributed/test_community.py."""

import pytest
import torch
from closeness import assert_close
from torch import nn
from transformers.models.t5.modeling_t5 import T5LayerNorm as TransformersNorm

from opensora_cli.community.parallel import (
    BandwidthMonitor,
    RobustCommunication,
    T5LayerNorm,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.text.t5 import FusedRMSNorm


class ApexNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape, self.eps = torch.Size([6]), 1e-3
        self.weight = nn.Parameter(torch.arange(6.0))


class OurNorm(FusedRMSNorm):
    def __init__(self) -> None:
        super().__init__(6, eps=1e-3)
        self.weight = nn.Parameter(torch.arange(6.0))


def test_without_a_group_a_collective_has_no_effect():
    x = torch.ones(2, 3)
    assert gather_forward_split_backward(x, None, -1) is split_forward_gather_backward(x, None, -1) is x


@pytest.mark.parametrize("collective", [gather_forward_split_backward, split_forward_gather_backward])
def test_another_order_or_scale_is_refused(collective):
    with pytest.raises(RequestError, match="process_group=1 is no group") as caught:
        collective(torch.ones(2), 1, None)
    assert caught.value.hint == "the order is (input_, process_group, dim)"
    with pytest.raises(RequestError, match="'half' must be 'up', 'down' or None"):
        collective(torch.ones(2), None, -1, grad_scale="half")
    with pytest.raises(RequestError, match=r"grad_scale=0\.5"):
        collective(torch.ones(2), None, -1, 0.5)


class TestT5LayerNorm:
    def test_it_computes_what_transformers_does(self):
        ours, theirs, x = T5LayerNorm(8, eps=1e-3), TransformersNorm(8, eps=1e-3), torch.randn(2, 8)
        assert ours.variance_epsilon == 1e-3
        assert T5LayerNorm(8).variance_epsilon == 1e-6
        assert_close(ours(x), theirs(x))

    @pytest.mark.parametrize("make", [ApexNorm, OurNorm])
    def test_fused_norms_are_converted_with_a_copy_of_their_weight(self, make):
        native = make()
        made = T5LayerNorm.from_native_module(native, sp_partial_derived=False)
        assert isinstance(made, T5LayerNorm)
        assert (made.variance_epsilon, made.weight.tolist()) == (1e-3, [0, 1, 2, 3, 4, 5])
        assert made.weight is not native.weight


def test_a_link_is_congested_when_it_becomes_slow(monkeypatch):
    monitor, now = BandwidthMonitor(), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert not monitor.is_congested()
    for seconds, congested in ((1e-3, False), (1e-3, False), (5e-3, True)):
        with monitor.measure("any group", 1000, device=torch.device("cpu")):
            now[0] += seconds
        assert monitor.is_congested() is congested


class TestVerifying:
    robust = RobustCommunication(max_retries=3)

    def test_wrong_results_are_assertion_errors(self):
        x = torch.ones(1, 4, 2)
        with pytest.raises(AssertionError, match=r"gave \(1, 4\) and not \(1, 4, 2\)"):
            self.robust.verify_communication(x, x[:, :, 0], "all_to_all")
        with pytest.raises(AssertionError, match="not finite"):
            self.robust.verify_communication(x, x / 0, "all_to_all")
        with pytest.raises(RequestError, match="must be all_to_all or gather_split"):
            self.robust.calculate_expected_shape(x, "broadcast")
