import torch
from torch import nn

from opensora_cli.engine.mem_profile.measured_stages import fill_randomly


def test_random_weights_are_frozen_and_shared_ones_stay_shared():
    with torch.device("meta"):
        layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
        layers.append(layers[0])
    fill_randomly(layers, torch.device("cpu"))
    weights = dict(layers.named_parameters())
    # A model that trains would decode all frames at once.
    assert not any(weight.requires_grad or weight.is_meta for weight in weights.values())
    assert layers[2].weight is layers[0].weight
    assert isinstance(layers[0].weight, nn.Parameter)
    assert not layers[1].running_mean.is_meta
