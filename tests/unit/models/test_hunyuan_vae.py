"""The causal VAE: its layers against plain formulas, its tiles, its memory, its training, its refusals."""

import subprocess
import sys

import pytest
import torch
from closeness import assert_close
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.hunyuan import HunyuanVAE, HunyuanVAEConfig
from opensora_cli.models.vae.hunyuan_blocks import CausalConv3d, FrameCausalAttention
from opensora_cli.models.vae.resample import conv_of_upsampled, replicate_pad
from opensora_cli.models.vae.tiling import Tiling, blend, run_tiled

SMALL = HunyuanVAEConfig(
    latent_channels=4,
    block_out_channels=(8, 8, 16),
    layers_per_block=1,
    norm_num_groups=4,
    sample_size=16,
    sample_tsize=16,
    time_compression_ratio=4,
    spatial_compression_ratio=4,
)

# The released model's longest temporal tile of one spatial tile: the most positions that its attention ever meets.
FRAMES, EDGE = 33, 32
DENSE_MASK_BYTES = (FRAMES * EDGE * EDGE) ** 2 * 4


def small_vae(config=SMALL, *, seed=0):
    torch.manual_seed(seed)
    return HunyuanVAE(config)


def random_clip(*shape, seed=1, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 - 1


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "time", "space", "factors", "num_latent_frames"),
    [
        ((8, 8, 8, 8), 4, 8, ((1, 2), (2, 2), (2, 2), (1, 1)), 3),
        ((8, 8, 8), 4, 4, ((2, 2), (2, 2), (1, 1)), 1),
        ((8, 8, 8), 2, 8, ((1, 2), (2, 2), (1, 2)), 3),
        ((8, 8, 8), 4, 2, ((2, 2), (2, 1), (1, 1)), 3),
        ((8,), 1, 1, ((1, 1),), 1),
    ],
)
def test_every_choice_of_ratios_compresses_by_them(widths, time, space, factors, num_latent_frames):
    config = HunyuanVAEConfig(
        latent_channels=2,
        block_out_channels=widths,
        layers_per_block=1,
        norm_num_groups=2,
        time_compression_ratio=time,
        spatial_compression_ratio=space,
    )
    assert config.level_factors == factors
    vae = small_vae(config)
    pixels = random_clip(2, 3, (num_latent_frames - 1) * time + 1, 2 * space, 3 * space)
    with torch.no_grad():
        latents = vae.encode(pixels)
        assert latents.shape == (2, 2, num_latent_frames, 2, 3)
        assert vae.decode(latents).shape == pixels.shape


def test_lists_from_json_make_an_equal_and_hashable_configuration():
    config = HunyuanVAEConfig(block_out_channels=[128, 256, 512, 512])
    assert config == HunyuanVAEConfig()
    assert hash(config) == hash(HunyuanVAEConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_out_channels": ()}, "vae.block_out_channels is empty"),
        ({"layers_per_block": 0}, "vae.layers_per_block=0"),
        ({"norm_num_groups": 48}, "vae.norm_num_groups=48 must divide every width"),
        ({"time_compression_ratio": 16}, "vae.time_compression_ratio=16 .* use 1, 2, 4, 8$"),
        ({"spatial_compression_ratio": 12}, "vae.spatial_compression_ratio=12 .* use 1, 2, 4, 8, 16$"),
        ({"sample_size": 40}, "vae.sample_size=40 .* multiples of vae.spatial_compression_ratio=8"),
        ({"sample_tsize": 8}, "vae.sample_tsize=8 .* multiples of vae.time_compression_ratio=4"),
        ({"tile_overlap_factor": 1.0}, "vae.tile_overlap_factor=1.0"),
    ],
)
def test_configurations_that_contradict_themselves(change, message):
    with pytest.raises(RequestError, match=message):
        HunyuanVAEConfig(**change)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 6, 8, 8), "num_frames=6 must be 1 more than a multiple of 4: use 5 or 9"),
        ((1, 3, 5, 8, 6), "height=8 and width=6 must be multiples of 4"),
        ((1, 4, 5, 8, 8), r"expected \(batch, 3, frames, height, width\)"),
        ((3, 5, 8, 8), r"expected \(batch, 3, frames, height, width\)"),
        ((1, 3, 0, 8, 8), "cannot be encoded"),
    ],
)
def test_clips_that_cannot_be_encoded(shape, message):
    with pytest.raises(RequestError, match=message):
        small_vae().encode(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(1, 3, 2, 2, 2), (4, 2, 2, 2), (1, 4, 0, 2, 2)])
def test_latents_that_cannot_be_decoded(shape):
    with pytest.raises(RequestError, match=r"expected \(batch, 4, latent frames, latent height, latent width\)"):
        small_vae().decode(torch.zeros(shape))


# --- layers --------------------------------------------------------------------------------------------------------


def test_causal_conv_sees_no_later_frame():
    torch.manual_seed(0)
    conv = CausalConv3d(2, 3)
    clip = random_clip(1, 2, 5, 4, 4)
    changed = clip.clone()
    changed[:, :, 3:] += 1
    with torch.no_grad():
        before, after = conv(clip), conv(changed)
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.allclose(before[:, :, 3], after[:, :, 3])


def test_causal_conv_of_a_still_clip_is_still_and_has_no_border():
    torch.manual_seed(0)
    conv = CausalConv3d(2, 3)
    with torch.no_grad():
        out = conv(torch.ones(1, 2, 4, 5, 5))
    assert_close(out, out[:, :, :1, :1, :1].expand_as(out))


@pytest.mark.parametrize(
    ("time", "space", "num_frames", "memory_format"),
    [
        (1, 2, 3, torch.contiguous_format),
        (2, 1, 3, torch.channels_last_3d),
        (2, 2, 3, torch.contiguous_format),
        (2, 2, 1, torch.channels_last_3d),
        (1, 1, 1, torch.contiguous_format),
    ],
)
def test_conv_of_upsampled_equals_upsampling_then_convolving(time, space, num_frames, memory_format):
    torch.manual_seed(0)
    conv = CausalConv3d(4, 6).double()
    clip = random_clip(2, 4, num_frames, 3, 5, dtype=torch.float64).contiguous(memory_format=memory_format)
    clip.requires_grad_()
    wide = clip.repeat_interleave(space, dim=3).repeat_interleave(space, dim=4)
    expected = conv(torch.cat((wide[:, :, :1], wide[:, :, 1:].repeat_interleave(time, dim=2)), dim=2))
    actual = conv_of_upsampled(clip, conv.conv, time=time, space=space)
    assert_close(actual, expected)

    weighting = torch.randn_like(expected)
    inputs = (clip, conv.conv.weight, conv.conv.bias)
    gradients = [torch.autograd.grad((output * weighting).sum(), inputs) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, tolerance=1e-10, floor=1.0)  # that of the keys' bias is zero


def dense_attention(layer: FrameCausalAttention, hidden):
    """The formula with the full mask."""
    num_frames, height, width = hidden.shape[2:]
    tokens = layer.group_norm(hidden).flatten(2).transpose(1, 2)
    frame = torch.arange(num_frames).repeat_interleave(height * width)
    scores = layer.to_q(tokens) @ layer.to_k(tokens).transpose(1, 2) / tokens.shape[-1] ** 0.5
    scores = scores.masked_fill(frame[None, :] > frame[:, None], float("-inf"))
    out = layer.to_out[0](scores.softmax(-1) @ layer.to_v(tokens))
    return hidden + out.transpose(1, 2).reshape(hidden.shape)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_attention_equals_the_masked_formula_forward_and_backward(memory_format):
    torch.manual_seed(0)
    layer = FrameCausalAttention(8, num_groups=2).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    hidden = random_clip(2, 8, 4, 3, 5, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    actual, expected = layer(hidden), dense_attention(layer, hidden)
    assert_close(actual, expected)
    weighting = torch.randn_like(expected)
    inputs = (hidden, *layer.parameters())
    gradients = [torch.autograd.grad((output * weighting).sum(), inputs) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(ours, theirs, tolerance=1e-10, floor=1.0)  # that of the keys' bias is zero


# --- memory of the attention -----------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Notes the largest storage that any operation returns, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def test_the_dense_mask_would_be_noticed():
    with LargestTensor() as largest:
        torch.ones(FRAMES * EDGE**2, 1, device="meta") * torch.ones(1, FRAMES * EDGE**2, device="meta")
    assert largest.bytes == DENSE_MASK_BYTES


def test_attention_builds_no_tensor_of_the_order_of_the_dense_mask():
    torch.manual_seed(0)
    layer = FrameCausalAttention(8, num_groups=2)
    with torch.no_grad(), LargestTensor() as largest:
        layer(torch.randn(1, 8, FRAMES, EDGE, EDGE))
    # Not even one frame's scores against all positions, 0.138 GB.
    assert 0 < largest.bytes < DENSE_MASK_BYTES / FRAMES / 10


PEAK_OF_ATTENTION = """
import sys
from pathlib import Path
import torch
from opensora_cli.models.vae.hunyuan_blocks import FrameCausalAttention

def kib(field):
    # Not getrusage: its peak is inherited from the process that started this one.
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

frames, edge, training = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "training"
torch.manual_seed(0)
torch.set_num_threads(1)
layer = FrameCausalAttention(8, num_groups=2)
layer(torch.randn(1, 8, 2, 4, 4, requires_grad=True)).sum().backward()  # pages of the library come in now
layer.zero_grad()
hidden = torch.randn(1, 8, frames, edge, edge, requires_grad=training)
before = kib("VmRSS")
with torch.set_grad_enabled(training):
    out = layer(hidden)
    if training:
        out.sum().backward()
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("edge", "purpose"), [(EDGE, "inference"), (24, "training")])
def test_attention_grows_the_process_by_less_than_a_tenth_of_the_dense_mask(edge, purpose):
    # What a kernel allocates inside shows only here. The output, 1 MB, is counted too.
    command = [sys.executable, "-c", PEAK_OF_ATTENTION, str(FRAMES), str(edge), purpose]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    dense_mask_bytes = (FRAMES * edge**2) ** 2 * 4
    assert 0 < int(done.stdout) < dense_mask_bytes / 10


# --- latents -------------------------------------------------------------------------------------------------------


def test_encode_scales_the_mode_or_a_seeded_sample_of_the_posterior():
    config = HunyuanVAEConfig(
        latent_channels=4,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        time_compression_ratio=2,
        spatial_compression_ratio=4,
        scale_factor=0.5,
        shift_factor=0.25,
    )
    vae, pixels = small_vae(config), random_clip(1, 3, 3, 8, 8)
    with torch.no_grad():
        mean, logvar = vae.encode_moments(pixels)
        mode = vae.encode(pixels)
        sample = vae.encode(pixels, generator=torch.Generator().manual_seed(5))
        again = vae.encode(pixels, generator=torch.Generator().manual_seed(5))
    assert_close(mode, 0.5 * (mean - 0.25))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(5))
    assert_close(sample, 0.5 * (mean + (logvar / 2).exp() * noise - 0.25))
    assert torch.equal(sample, again)


def test_log_variances_are_bounded():
    vae = small_vae()
    nn.init.constant_(vae.quant_conv.bias, 1000.0)
    with torch.no_grad():
        _, high = vae.encode_moments(random_clip(1, 3, 1, 8, 8))
        nn.init.constant_(vae.quant_conv.bias, -1000.0)
        _, low = vae.encode_moments(random_clip(1, 3, 1, 8, 8))
    assert (high == 20).all()
    assert (low == -30).all()


def test_decode_undoes_the_scaling():
    plain, scaled = (
        small_vae(HunyuanVAEConfig(**{**vars_of(SMALL), "scale_factor": scale, "shift_factor": shift}))
        for scale, shift in ((1.0, 0.0), (0.3611, 0.1159))
    )
    posterior = random_clip(1, 4, 2, 2, 2)
    with torch.no_grad():
        assert_close(scaled.decode(scaled.scale_latents(posterior)), plain.decode(posterior))


def vars_of(config: HunyuanVAEConfig):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


# --- tiles -----------------------------------------------------------------------------------------------------------


def down(pixels):
    """An encoder that looks at one pixel for each latent: tiling it must change nothing."""
    return pixels[:, :, ::4, ::4, ::4]


def up(latents):
    """A decoder that repeats latents."""
    wide = latents.repeat_interleave(4, dim=3).repeat_interleave(4, dim=4)
    return torch.cat((wide[:, :, :1], wide[:, :, 1:].repeat_interleave(4, dim=2)), dim=2)


@pytest.mark.parametrize(
    ("tiling", "num_latent_frames", "height", "width"),
    [
        *((Tiling(temporal=True), frames, 2, 3) for frames in (1, 4, 5, 6, 7, 8, 12)),
        *((Tiling(spatial=True), 2, height, width) for height, width in ((4, 4), (5, 4), (2, 7), (6, 11))),
        (Tiling(spatial=True, temporal=True), 12, 6, 11),
        (Tiling(spatial=True, temporal=True), 5, 4, 5),
    ],
)
def test_tiles_of_local_functions_fit_together(tiling, num_latent_frames, height, width):
    latents = random_clip(2, 3, num_latent_frames, height, width)
    pixels = up(latents)
    decoded = run_tiled(up, latents, grid=SMALL.tile_grids()[1], tiling=tiling)
    encoded = run_tiled(down, pixels, grid=SMALL.tile_grids()[0], tiling=tiling)
    assert_close(decoded, pixels)
    assert_close(encoded, latents)


def tile_shapes(clip, *, tiling):
    shapes = []

    def run(tile):
        shapes.append(tuple(tile.shape[2:]))
        return down(tile)

    run_tiled(run, clip, grid=SMALL.tile_grids()[0], tiling=tiling)
    return shapes


def test_tiles_start_at_every_stride():
    shapes = tile_shapes(torch.zeros(1, 1, 1, 16, 28), tiling=Tiling(spatial=True))
    assert shapes == [(1, h, w) for h in (16, 4) for w in (16, 16, 4)]
    assert tile_shapes(torch.zeros(1, 1, 33, 8, 8), tiling=Tiling(temporal=True)) == [(17, 8, 8), (17, 8, 8), (9, 8, 8)]
    # The reference cuts a clip that its first tile, one frame longer than sample_tsize, already covers.
    assert tile_shapes(torch.zeros(1, 1, 17, 8, 8), tiling=Tiling(temporal=True)) == [(17, 8, 8), (5, 8, 8)]


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        ((5, 16, 16), Tiling(spatial=True, temporal=True)),
        ((33, 16, 16), Tiling(spatial=True)),
        ((5, 40, 40), Tiling(temporal=True)),
        ((33, 40, 40), Tiling()),
    ],
)
def test_a_clip_is_cut_only_along_the_chosen_axes_that_exceed_a_tile(shape, tiling):
    assert tile_shapes(torch.zeros(1, 1, *shape), tiling=tiling) == [shape]


def test_a_last_tile_that_adds_nothing_is_not_computed():
    shapes = tile_shapes(torch.zeros(1, 1, 25, 8, 8), tiling=Tiling(temporal=True))
    assert shapes == [(17, 8, 8), (13, 8, 8)]


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_blend_fades_linearly_from_the_tile_before(dim):
    before, after = torch.full((1, 1, 6, 6, 6), 8.0), torch.zeros(1, 1, 6, 6, 6)
    line = blend(before, after, length=4, dim=dim).movedim(dim, -1)
    assert torch.equal(line, torch.tensor([8.0, 6.0, 4.0, 2.0, 0.0, 0.0]).expand_as(line))


def test_blend_uses_the_end_of_the_tile_before_and_no_more_than_both_have():
    before, after = torch.arange(6.0).view(1, 1, 6, 1, 1), torch.full((1, 1, 2, 1, 1), 9.0)
    assert blend(before, after, length=4, dim=2).flatten().tolist() == [4.0, 7.0]
    assert blend(before, after[:, :, :0], length=4, dim=2).shape[2] == 0


def test_a_tile_is_decoded_on_its_own():
    vae, latents = small_vae(), random_clip(1, 4, 6, 6, 6)
    with torch.no_grad():
        tiled = vae.decode(latents, tiling=Tiling(spatial=True, temporal=True))
        first_tile = vae.decode(latents[:, :, :5, :4, :4])
    assert tiled.shape == (1, 3, 21, 24, 24)
    # Up to where the next tile begins, nothing is blended.
    assert_close(tiled[:, :, :13, :12, :12], first_tile[:, :, :13, :12, :12])


# --- training ------------------------------------------------------------------------------------------------------


def gradients(vae, pixels, *, autocast):
    vae.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mean, logvar = vae.encode_moments(pixels)
        # A constant in place of noise, so that both runs see the same posterior sample.
        pixels_back = vae.decode(vae.scale_latents(mean + 0.5 * torch.exp(0.5 * logvar)))
    functional.mse_loss(pixels_back.float(), pixels).backward()
    return {name: parameter.grad.clone() for name, parameter in vae.named_parameters()}


def test_every_weight_is_trained_alike_in_fp32_and_under_bf16_autocast():
    vae, pixels = small_vae(), random_clip(2, 3, 5, 16, 16)
    full, mixed = (gradients(vae, pixels, autocast=autocast) for autocast in (False, True))
    for name, expected in full.items():
        # A bias before softmax over keys shifts all scores of a query alike: its gradient is zero but for rounding.
        if name.endswith("to_k.bias"):
            continue
        assert expected.abs().max() > 0, name
        assert mixed[name].isfinite().all(), name
    flat_full, flat_mixed = (torch.cat([grad.flatten() for grad in grads.values()]) for grads in (full, mixed))
    assert functional.cosine_similarity(flat_full, flat_mixed, dim=0) > 0.95


def test_every_convolution_meets_channels_last_clips_on_a_cpu():
    vae, pixels = small_vae(), random_clip(1, 3, 5, 16, 24)
    seen = []

    def note(module, args):
        seen.append(args[0].is_contiguous(memory_format=torch.channels_last_3d))

    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_pre_hook(note)
    with torch.no_grad():
        vae.decode(vae.encode(pixels))
    # All but the two projections of latents, which are too small to matter.
    assert len(seen) > 20
    assert seen.count(False) <= 2


def test_padding_stays_in_bf16_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        padded = replicate_pad(torch.ones(1, 1, 1, 2, 2, dtype=torch.bfloat16), (1, 1, 1, 1, 2, 0))
    assert padded.dtype == torch.bfloat16
    assert padded.shape == (1, 1, 3, 4, 4)
