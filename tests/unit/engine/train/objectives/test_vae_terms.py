"""Terms of the autoencoder's loss: LPIPS against its formula, its files, and the discriminator."""

import pytest
import torch
from closeness import assert_close
from safetensors.torch import save_file
from torch import nn

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.train.objectives.vae import PatchDiscriminator3d, load_perceptual_distance

WIDTHS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512)
# Places in torchvision's list of layers, and in lpips' five slices of it: each slice ends with a stage's last ReLU.
ENDS = (3, 8, 15, 22, 29)


@pytest.fixture(scope="module")
def vgg():
    """The layers in torchvision's order."""
    torch.manual_seed(0)
    layers, channels = [], 3
    for width in WIDTHS:
        if width == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            conv = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight)  # else the signal dies out on its way
            layers += [conv, nn.ReLU()]
            channels = width
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def linears():
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(width, generator=generator) / width for width in (64, 128, 256, 512, 512)]


@pytest.fixture(scope="module")
def files(tmp_path_factory, vgg, linears):
    """As they are published: of torchvision with its classifier, and of lpips."""
    folder = tmp_path_factory.mktemp("lpips")
    features = {f"features.{name}": weight for name, weight in vgg.state_dict().items()}
    torch.save({**features, "classifier.0.weight": torch.zeros(2, 3)}, folder / "vgg16.pth")
    torch.save(
        {f"lin{i}.model.1.weight": weight.view(1, -1, 1, 1) for i, weight in enumerate(linears)}, folder / "vgg.pth"
    )
    return [folder / "vgg16.pth", folder / "vgg.pth"]


@pytest.fixture(scope="module")
def distance(files):
    return load_perceptual_distance(files)


def frames(seed, *, num_frames=2, size=16):
    return torch.rand(1, 3, num_frames, size, size, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0


@torch.no_grad()
def written_out(vgg, linears, made, real):
    total = 0.0
    for index in range(made.shape[2]):
        features = []
        for picture in (made[:, :, index], real[:, :, index]):
            hidden = (picture - torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)) / torch.tensor(
                [0.458, 0.448, 0.450]
            ).view(3, 1, 1)
            stages = []
            for place, layer in enumerate(vgg):
                hidden = layer(hidden)
                if place in ENDS:
                    stages.append(hidden / (hidden.square().sum(1, keepdim=True).sqrt() + 1e-10))
            features.append(stages)
        for first, second, weight in zip(*features, linears, strict=True):
            total += float(torch.einsum("bchw,c->bhw", (first - second) ** 2, weight).mean())
    return total / made.shape[2]


def test_the_formula(distance, vgg, linears):
    made, real = frames(0), frames(1)
    expected = written_out(vgg, linears, made, real)
    assert expected > 1e-3
    assert float(distance(made, real)) == pytest.approx(expected, rel=1e-4)


def test_gradients_reach_the_decoded_clip_alone_and_stay_finite(distance):
    made, real = frames(0, num_frames=1).requires_grad_(), frames(1, num_frames=1).requires_grad_()
    distance(made, real).backward()
    assert made.grad.abs().sum() > 0
    assert torch.isfinite(made.grad).all()
    assert real.grad is None
    assert not any(weight.requires_grad for weight in distance.parameters())


class TestFiles:
    def test_a_whole_lpips_in_one_file(self, tmp_path, distance, vgg, linears):
        weights = {f"lin{i}.model.1.weight": weight.view(1, -1, 1, 1) for i, weight in enumerate(linears)}
        # A whole module also lists its linear layers a second time.
        weights |= {f"lins.{name[3]}{name[4:]}": weight.clone() for name, weight in weights.items()}
        for name, weight in vgg.state_dict().items():
            place = int(name.split(".")[0])
            weights[f"net.slice{1 + sum(place > end for end in ENDS)}.{name}"] = weight
        weights["scaling_layer.shift"] = torch.zeros(1, 3, 1, 1)
        save_file(weights, tmp_path / "lpips.safetensors")
        loaded = load_perceptual_distance([tmp_path / "lpips.safetensors"]).state_dict()
        assert len(loaded) == 31
        assert all(torch.equal(weight, loaded[name]) for name, weight in distance.state_dict().items())

    def test_the_linear_layers_are_missing(self, files):
        with pytest.raises(CheckpointError, match=r"5 missing \(lins\.0") as caught:
            load_perceptual_distance(files[:1])
        assert "vgg.pth" in caught.value.hint

    def test_another_network(self, tmp_path):
        torch.save({"features.0.weight": torch.zeros(64, 3, 11, 11)}, tmp_path / "alexnet.pth")
        with pytest.raises(CheckpointError, match=r"1 of another shape \(features\.0\.weight: file \[64, 3, 11, 11\]"):
            load_perceptual_distance([tmp_path / "alexnet.pth"])


@pytest.fixture
def discriminator():
    torch.manual_seed(0)
    return PatchDiscriminator3d(width=8, layers=3)


@pytest.mark.parametrize(
    ("shape", "patches"),
    [((17, 32, 32), (3, 4, 4)), ((1, 32, 48), (1, 4, 6)), ((5, 20, 12), (1, 3, 2)), ((1, 1, 1), (1, 1, 1))],
)
def test_every_size_has_an_answer(discriminator, shape, patches):
    assert discriminator(torch.randn(2, 3, *shape)).shape == (2, 1, *patches)


def test_a_sample_does_not_see_the_others(discriminator):
    clips = torch.randn(3, 3, 5, 16, 16, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([discriminator(clip[None]) for clip in clips])
    assert_close(discriminator(clips), alone)
    assert alone.flatten(1).std(dim=0).max() > 1e-4
