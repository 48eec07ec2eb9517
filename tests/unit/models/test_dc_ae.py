"""The video DC-AE: its layers against plain formulas, its tiles, its training, its refusals."""

import pytest
import torch
from closeness import assert_close
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.estimate.fake_tensors import fake_device, fake_module
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.vae.dc_ae import DCAE, DCAEConfig
from opensora_cli.models.vae.dc_ae_blocks import (
    ChannelRMSNorm,
    ClipConv3d,
    ConvPair,
    Residual,
    average_channels,
    relu_attention,
    repeat_channels,
)
from opensora_cli.models.vae.tiling import Tiling, run_tiled

SMALL = {
    "latent_channels": 8,
    "block_types": ("res", "efficientvit", "efficientvit"),
    "width_list": (8, 32, 32),
    "encoder_depth_list": (1, 1, 1),
    "decoder_depth_list": (1, 1, 1),
    "temporal": (True, True, False),
    "spatial_tile_size": 16,
    "temporal_tile_size": 16,
}


def small_vae(**changes):
    torch.manual_seed(0)
    return DCAE(DCAEConfig(**{**SMALL, **changes}))


def random_clip(*shape, seed=1, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


# --- layers --------------------------------------------------------------------------------------------------------


def test_attention_is_the_mean_of_values_by_relu_products():
    q, k, v = (random_clip(2, 3, 5, 7, seed=seed, dtype=torch.float64) for seed in range(3))
    weights = torch.einsum("bhcn,bhcm->bhnm", q.relu(), k.relu())
    expected = torch.einsum("bhnm,bhcm->bhcn", weights / weights.sum(-1, keepdim=True).clamp_min(1e-15), v)
    assert_close(relu_attention(q, k, v), expected)


def test_attention_adds_up_in_full_precision_under_autocast():
    q, k, v = (torch.ones(1, 1, 2, 5000, dtype=torch.bfloat16) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attended = relu_attention(q, k, v)
    assert attended.dtype == torch.float32
    assert_close(attended, torch.ones(1, 1, 2, 5000))


def test_queries_that_see_nothing_give_zero():
    minus = -torch.ones(1, 1, 2, 3)
    assert torch.equal(relu_attention(minus, minus, torch.ones(1, 1, 2, 3)), torch.zeros(1, 1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norm_divides_by_the_root_mean_square_of_the_channels(dtype):
    norm = ChannelRMSNorm(6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1, 7))
        norm.bias.fill_(0.5)
    hidden = random_clip(2, 6, 3, 4, 5).to(dtype)
    wide = hidden.double()
    scale = (wide.square().mean(1, keepdim=True) + 1e-5).sqrt()
    expected = wide / scale * torch.arange(1, 7).double().view(-1, 1, 1, 1) + 0.5
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(norm(hidden).double(), expected, atol=tolerance, rtol=tolerance)
    assert norm(hidden).dtype == dtype


def test_a_clip_stays_in_half_precision_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = Residual(ConvPair(8))(torch.zeros(1, 8, 1, 4, 4, dtype=torch.bfloat16))
    assert hidden.dtype == torch.bfloat16


def test_a_norm_of_zeros_has_a_finite_gradient():
    hidden = torch.zeros(1, 4, 1, 1, 1, requires_grad=True)
    ChannelRMSNorm(4)(hidden).sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_shortcuts_average_and_repeat_neighbouring_channels():
    hidden = torch.arange(8.0).view(1, 8, 1, 1, 1)
    assert average_channels(hidden, 4).flatten().tolist() == [0.5, 2.5, 4.5, 6.5]
    assert repeat_channels(hidden[:, :2], 4).flatten().tolist() == [0, 0, 1, 1]
    assert torch.equal(average_channels(repeat_channels(hidden, 24), 8), hidden)


@pytest.mark.parametrize(("kernel_size", "num_frames"), [(3, 1), (3, 2), (3, 4), (5, 2), (5, 4), (5, 5)])
def test_bf16_gradients_of_short_clips_come_from_the_clip_alone(kernel_size, num_frames):
    torch.manual_seed(0)
    conv = ClipConv3d(8, 8, kernel_size, padding=kernel_size // 2)
    pixels = random_clip(1, 8, num_frames, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(pixels)
    gradient = random_clip(*out.shape, seed=2)
    for _ in range(5):
        # What would be read by mistake is then not zero by chance.
        poison = [torch.full((size,), torch.nan) for size in (100, 1000, 10_000, 100_000)]
        del poison
        (actual,) = torch.autograd.grad(out, conv.weight, gradient.bfloat16(), retain_graph=True)
        (expected,) = torch.autograd.grad(
            functional.conv3d(pixels, conv.weight, conv.bias, padding=kernel_size // 2), conv.weight, gradient
        )
        torch.testing.assert_close(actual, expected, atol=0.3, rtol=0.05)


# --- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_frames", [1, 4, 8, 20])
def test_a_decoded_clip_has_the_shape_that_the_grid_promises(num_frames):
    vae = small_vae().requires_grad_(False)
    pixels = random_clip(2, 3, num_frames, 8, 12)
    latents = vae.encode(pixels)
    assert latents.shape == (2, 8, vae.grid.latent_frames(num_frames), *vae.grid.latent_size(8, 12))
    assert vae.decode(latents).shape == (2, 3, vae.grid.num_frames(latents.shape[2]), 8, 12)


def test_every_frame_sees_every_other():
    vae = small_vae().requires_grad_(False)
    pixels = random_clip(1, 3, 8, 8, 8)
    changed = pixels.clone()
    changed[:, :, -1] += 0.5
    difference = (vae.encode(changed) - vae.encode(pixels)).abs().amax(dim=(0, 1, 3, 4))
    assert (difference > 0).all()


def test_latents_are_divided_by_the_scaling_factor():
    pixels = random_clip(1, 3, 4, 8, 8)
    plain, scaled = (small_vae(scaling_factor=factor).requires_grad_(False) for factor in (None, 0.5))
    assert_close(scaled.encode(pixels), 2 * plain.encode(pixels))
    assert_close(scaled.decode(scaled.encode(pixels)), plain.decode(plain.encode(pixels)))


def test_there_is_no_posterior():
    vae = small_vae().requires_grad_(False)
    pixels = random_clip(1, 3, 4, 8, 8)
    assert torch.equal(vae.encode(pixels, generator=torch.Generator().manual_seed(3)), vae.encode(pixels))
    result = vae(pixels)
    assert result.logvar_BCTHW is None
    assert torch.equal(result.mean_BCTHW, vae.encode(pixels))
    assert torch.equal(result.pixels_BCTHW, vae.decode(vae.encode(pixels)))


@pytest.mark.parametrize(("autocast", "num_frames"), [(False, 8), (True, 1), (True, 8)])
def test_every_weight_learns(autocast, num_frames):
    vae = small_vae()
    pixels = random_clip(1, 3, num_frames, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        decoded = vae(pixels).pixels_BCTHW
    functional.mse_loss(decoded.float(), pixels).backward()
    for name, parameter in vae.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_the_last_layer_is_where_pixels_come_from():
    vae = small_vae()
    assert vae.last_layer.weight is dict(vae.named_parameters())["decoder.project_out.op_list.2.conv.weight"]


# --- tiles ---------------------------------------------------------------------------------------------------------


def down(pixels):
    """An encoder that takes one value of each compressed block."""
    return pixels[:, :, ::4, ::4, ::4]


def up(latents):
    """A decoder that repeats latents, and takes a single latent frame for a picture."""
    wide = latents.repeat_interleave(4, dim=3).repeat_interleave(4, dim=4)
    return wide if latents.shape[2] == 1 else wide.repeat_interleave(4, dim=2)


@pytest.mark.parametrize(
    ("tiling", "num_latent_frames", "height", "width"),
    [
        *((Tiling(temporal=True), frames, 2, 3) for frames in range(2, 15)),
        *((Tiling(spatial=True), 2, height, width) for height, width in ((4, 4), (5, 4), (6, 11))),
        (Tiling(spatial=True, temporal=True), 10, 6, 11),
        (Tiling(spatial=True, temporal=True), 7, 5, 4),
    ],
)
def test_tiles_of_local_functions_fit_together(tiling, num_latent_frames, height, width):
    config = DCAEConfig(**SMALL)
    latents = random_clip(1, 3, num_latent_frames, height, width)
    pixels = up(latents)
    assert_close(run_tiled(up, latents, grid=config.tile_grids()[1], tiling=tiling), pixels)
    assert_close(run_tiled(down, pixels, grid=config.tile_grids()[0], tiling=tiling), latents)


@pytest.mark.parametrize("num_frames", [52, 76, 100, 124])
def test_no_frame_is_lost_where_the_last_tile_would_have_one_latent_frame(num_frames):
    config = DCAEConfig()
    lengths = []

    def decode(latents):
        lengths.append(latents.shape[2])
        return latents.repeat_interleave(4 if latents.shape[2] > 1 else 1, dim=2)

    latents = random_clip(1, 1, num_frames // 4, 1, 1)
    decoded = run_tiled(decode, latents, grid=config.tile_grids()[1], tiling=Tiling(temporal=True))
    assert lengths == [8] * (len(lengths) - 1) + [7]
    assert_close(decoded, latents.repeat_interleave(4, dim=2))


def test_pieces_come_as_they_are_finished():
    vae = small_vae().requires_grad_(False)
    latents = random_clip(1, 8, 10, 2, 2)
    pieces = list(vae.decode_pieces(latents, tiling=Tiling(temporal=True)))
    # The last of 10 latent frames is left to the third tile.
    assert [piece.shape[2] for piece in pieces] == [12, 12, 16]
    assert torch.equal(torch.cat(pieces, dim=2), vae.decode(latents, tiling=Tiling(temporal=True)))


def test_a_tile_takes_five_times_the_memory_of_its_widest_clip():
    config = DCAEConfig()
    clip_bytes = config.width_list[0] * config.temporal_tile_size * config.spatial_tile_size**2 * 2
    with fake_device("cuda") as device:
        vae = fake_module(lambda: DCAE(config), device=device, dtype=torch.bfloat16)
        for run, shape in ((vae.encode, (1, 3, 32, 256, 256)), (vae.decode, (1, 128, 8, 8, 8))):
            with TensorBytes(device_type=device.type) as counter:
                run(torch.empty(shape, device=device, dtype=torch.bfloat16))
                assert 4 * clip_bytes < counter.peak_bytes < 5.1 * clip_bytes


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width_list": (8, 32)}, "must all have an entry for each stage"),
        ({"width_list": (8, 40, 32)}, "multiples of 32 in efficientvit stages"),
        ({"width_list": (8, 64, 32)}, "64 must divide 4 times the width before it, 8"),
        ({"latent_channels": 12}, "vae.dc_ae.latent_channels=12 must divide the last"),
        ({"encoder_depth_list": (1, 0, 1)}, "must be at least 1"),
        ({"temporal": (True, True, True)}, "vae.dc_ae.temporal must end with false"),
        ({"spatial_tile_size": 18}, "vae.dc_ae.spatial_tile_size=18"),
        ({"tile_overlap_factor": 0.0}, "the overlap at least 4"),
        ({"scaling_factor": 0.0}, "vae.dc_ae.scaling_factor=0.0 must be over 0"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(RequestError, match=message):
        DCAEConfig(**{**SMALL, **change})


def test_lists_are_as_good_as_tuples():
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in SMALL.items()}
    assert DCAEConfig(**lists) == DCAEConfig(**SMALL)
    assert hash(DCAEConfig(**lists)) == hash(DCAEConfig(**SMALL))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 8, 8), "cannot be encoded"),
        ((1, 4, 8, 8, 8), "cannot be encoded"),
        ((1, 3, 0, 8, 8), "cannot be encoded"),
        ((1, 3, 6, 8, 8), "num_frames=6 must be 1, or a multiple of 4: use 4 or 8"),
        ((1, 3, 4, 8, 6), "height=8 and width=6 must be multiples of 4"),
    ],
)
def test_pixels_of_a_wrong_shape_are_refused(shape, message):
    with pytest.raises(RequestError, match=message):
        small_vae().encode(torch.zeros(shape))


def test_latents_of_a_wrong_shape_are_refused_before_anything_is_computed():
    with pytest.raises(RequestError, match=r"expected \(batch, 8, latent frames"):
        small_vae().decode_pieces(torch.zeros(1, 4, 1, 2, 2))
