"""What holds for every autoencoder: what its sizes and its inputs must be, and that all of its weights train."""

import pytest
import torch
from pydantic import ValidationError
from small_autoencoders import SMALL_DC_AE, SMALL_FLUX_AE, SMALL_HUNYUAN
from torch.nn import functional

from opensora_cli.core.exceptions import RequestError
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.flux_ae import FluxAE
from opensora_cli.models.vae.hunyuan import HunyuanVAE

MODELS = {"hunyuan": HunyuanVAE, "dc_ae": DCAE, "flux_ae": FluxAE}
CONFIGS = {"hunyuan": SMALL_HUNYUAN, "dc_ae": SMALL_DC_AE, "flux_ae": SMALL_FLUX_AE}


def small_vae(kind):
    torch.manual_seed(0)
    return MODELS[kind](CONFIGS[kind])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("hunyuan", {"block_out_channels": ()}, "at least 1 item"),
        ("hunyuan", {"norm_num_groups": 3}, "vae.norm_num_groups=3 must divide every width"),
        ("hunyuan", {"time_compression_ratio": 8}, "vae.time_compression_ratio=8 .* use 1, 2, 4 "),
        ("hunyuan", {"spatial_compression_ratio": 12}, "vae.spatial_compression_ratio=12 .* use 1, 2, 4, 8 "),
        ("hunyuan", {"sample_size": 40}, "vae.sample_size=40 .* multiples of vae.spatial_compression_ratio=4"),
        ("hunyuan", {"sample_tsize": 8}, "vae.sample_tsize=8 .* multiples of vae.time_compression_ratio=4"),
        ("dc_ae", {"width_list": (8, 32)}, "vae.dc_ae.width_list has 2 entries and must have 3"),
        ("dc_ae", {"width_list": (8, 40, 32)}, "multiples of 32 in efficientvit stages"),
        ("dc_ae", {"width_list": (8, 64, 32)}, "width_list=8,64,32 .* 4 times the width before it"),
        ("dc_ae", {"latent_channels": 12}, "a multiple of vae.dc_ae.latent_channels=12"),
        ("dc_ae", {"temporal": (True, True, True)}, "vae.dc_ae.temporal must end with false"),
        ("dc_ae", {"spatial_tile_size": 18}, "vae.dc_ae.spatial_tile_size=18"),
        ("dc_ae", {"tile_overlap_factor": 0.0}, "the overlap at least 4"),
        ("flux_ae", {"ch": 40}, "multiple of 32"),
        ("flux_ae", {"tile_size": 18}, "vae.flux_ae.tile_size=18"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(kind, change, message):
    with pytest.raises(ValidationError, match=message):
        CONFIGS[kind].replace(change)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("hunyuan", (1, 3, 6, 8, 8), "num_frames=6 must be 1 more than a multiple of 4: use 5 or 9"),
        ("dc_ae", (1, 3, 6, 8, 8), "num_frames=6 must be 1, or a multiple of 4: use 4 or 8"),
        ("flux_ae", (1, 3, 5, 8, 6), "height=8 and width=6 must be multiples of 4"),
        ("hunyuan", (1, 4, 5, 8, 8), r"expected \(batch, 3, frames, height, width\)"),
        ("dc_ae", (3, 5, 8, 8), r"expected \(batch, 3, frames, height, width\)"),
        ("hunyuan", (1, 3, 0, 8, 8), "cannot be encoded"),
    ],
)
def test_clips_that_cannot_be_encoded_are_refused(kind, shape, message):
    with pytest.raises(RequestError, match=message):
        small_vae(kind).encode(torch.zeros(shape))


def gradients(vae, pixels, *, autocast):
    vae.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        decoded = vae(pixels, generator=torch.Generator().manual_seed(0)).pixels_BCTHW
    functional.mse_loss(decoded.float(), pixels).backward()
    return {name: parameter.grad for name, parameter in vae.named_parameters()}


@pytest.mark.parametrize(("kind", "num_frames"), [("hunyuan", 5), ("dc_ae", 1), ("dc_ae", 8), ("flux_ae", 2)])
def test_every_weight_is_trained_alike_in_fp32_and_under_bf16_autocast(kind, num_frames):
    vae, pixels = small_vae(kind), torch.rand(1, 3, num_frames, 16, 16) * 2 - 1
    full, mixed = (gradients(vae, pixels, autocast=autocast) for autocast in (False, True))
    for name, expected in full.items():
        # A bias before softmax over keys shifts all scores of a query alike: its gradient is zero but for rounding.
        if not name.endswith(("to_k.bias", "attn_1.k.bias")):
            assert expected.any(), name
            assert mixed[name].any(), name
        assert mixed[name].isfinite().all(), name
    flat_full, flat_mixed = (torch.cat([grad.flatten() for grad in grads.values()]) for grads in (full, mixed))
    assert functional.cosine_similarity(flat_full, flat_mixed, dim=0) > 0.95
