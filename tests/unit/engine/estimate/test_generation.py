"""The estimate against tensors that are really allocated, of a run with random weights on the CPU."""

from dataclasses import replace
from math import prod
from unittest import mock

import pytest
import torch
from estimated_stages import beside_weights, counted, estimated, measured
from storage_sizes import storage_bytes

from opensora_cli.core.choices import LinearProducts
from opensora_cli.core.conditions import reference_parts
from opensora_cli.core.progress import SilentReporter
from opensora_cli.engine.components.architectures import mmdit_config, new_autoencoder, vae_tiling
from opensora_cli.engine.components.linear_products import use_in_block
from opensora_cli.engine.estimate import autoencoder
from opensora_cli.engine.estimate.fake_tensors import fake_device, fake_module
from opensora_cli.engine.estimate.offload import OffloadPlan
from opensora_cli.engine.estimate.outlines import HOST
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, load_t5
from opensora_cli.engine.generate.plan import Plan, make_plan
from opensora_cli.engine.generate.references import Reference, encode_references
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.media.resize import to_uint8
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.memory.eight_bit import store_in_fp8
from opensora_cli.memory.host_weights import slot_bytes, streaming_bytes
from opensora_cli.memory.streaming import stream_blocks
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.registry import DEMO
from opensora_cli.models.vae.config import Tiling
from opensora_cli.settings.devices import OffloadMode
from opensora_cli.settings.load import load_preset

TOLERANCE = 0.1

VARIANTS: dict[str, dict[str, object]] = {
    "the demo": {},
    "a picture": {"video.height": 128, "video.width": 112, "video.num_frames": 1},
    "a wide model, two scales": {
        "model.hidden_size": 384,
        "model.num_heads": 6,
        "model.depth": 1,
        "model.depth_single_blocks": 1,
        "condition.mode": "i2v_loop",
        "condition.references": ("any.png",),
        "sampling.image_guidance_scale": 3.0,
        "video.num_frames": 9,
    },
    "no single blocks, one branch": {
        "model.depth": 3,
        "model.depth_single_blocks": 0,
        "model.mlp_ratio": 6.0,
        "sampling.guidance_scale": 1.0,
    },
    "distilled, bfloat16": {
        "model.guidance_embed": True,
        "model.cond_embed": False,
        "runtime.dtype": "bfloat16",
        "video.height": 96,
        "video.width": 96,
    },
    "tiles": {
        "vae.spatial_tiling": True,
        "vae.temporal_tiling": True,
        "vae.sample_size": 32,
        "vae.sample_tsize": 16,
        "vae.block_out_channels": (8, 16, 32),
        "vae.layers_per_block": 1,
        "video.num_frames": 21,
        "video.max_frames": 21,
        "video.height": 48,
        "video.width": 32,
    },
    "high compression, in tiles": {
        "model.in_channels": 16,
        "model.patch_size": 1,
        "vae": {
            "kind": "dc_ae",
            "temporal_tiling": True,
            "dc_ae": {
                "latent_channels": 16,
                "block_types": ("res", "res", "efficientvit"),
                "width_list": (16, 32, 64),
                "encoder_depth_list": (1, 1, 1),
                "decoder_depth_list": (1, 1, 1),
                "temporal": (True, True, False),
                "spatial_tile_size": 32,
                "temporal_tile_size": 16,
            },
        },
        "video.num_frames": 24,
        "video.max_frames": 24,
        "video.height": 48,
        "video.width": 64,
    },
}
HIGH_COMPRESSION = VARIANTS["high compression, in tiles"]


def plan_of(changes: dict[str, object]) -> Plan:
    given = {"runtime.device": "cpu", "sampling.num_inference_steps": 4, **changes}
    # The demo's weights stand for those of other sizes, whose latents may have another scale.
    with mock.patch("opensora_cli.engine.generate.plan.require_same_scale"):
        return make_plan(load_preset(DEMO, prompt="raining, sea").replace(given))


def encode_peak(plan: Plan) -> int:
    vae = new_autoencoder(plan.settings.vae).to(plan.hardware.dtype).requires_grad_(False)
    parts = reference_parts(plan.mode, causal=plan.settings.vae.grid.is_causal, lengths=plan.settings.condition.lengths)

    def run() -> object:
        references = [Reference(torch.zeros(3, part.num_frames, plan.height, plan.width), True) for part in parts]
        return encode_references(references, vae, tiling=vae_tiling(plan.settings.vae))

    return counted(run)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "stage", "changes"),
    [
        ("a wide model, two scales", "denoise", {"chunk_tokens": 24}),
        ("a wide model, two scales", "decode", {"chunk_frames": 4}),
        *(pytest.param(name, "denoise", {"chunk_tokens": None}, marks=SLOW) for name in VARIANTS),
        pytest.param("the demo", "denoise", {"chunk_tokens": 48}, marks=SLOW),
        pytest.param("a picture", "denoise", {"chunk_tokens": 50}, marks=SLOW),
        # Convolutions in bf16 take minutes on most CPUs.
        *(pytest.param(name, "decode", {}, marks=SLOW) for name in VARIANTS if "bfloat16" not in name),
        pytest.param("the demo", "decode", {"chunk_frames": 4}, marks=SLOW),
    ],
)
def test_a_stage_takes_what_was_estimated(name: str, stage: str, changes: dict[str, int | None]):
    plan = plan_of(VARIANTS[name])
    offload = replace(plan.offload, **changes)
    assert beside_weights(estimated(plan, offload)[stage]) == pytest.approx(
        measured(plan, offload, stage), rel=TOLERANCE
    )


SMALL_VAE = load_preset(DEMO, prompt="any").vae.replace(
    {
        "latent_channels": 4,
        "block_out_channels": (8, 8, 16),
        "layers_per_block": 2,
        "norm_num_groups": 4,
        "spatial_compression_ratio": 4,
        "sample_size": 16,
        "sample_tsize": 32,
    }
)
"""Tiles of 4 x 4 latents and 8 + 1 latent frames."""


def decoded_on_outlines(
    shape: tuple[int, int, int], tiling: Tiling, device_type: str, *, frames: int, store: str
) -> int:
    """Return the peak of all tiles and chunks, one after the other."""
    with fake_device(device_type) as device:
        vae = fake_module(lambda: new_autoencoder(SMALL_VAE), device=device, dtype=torch.bfloat16)
        options = {"chunk_frames": frames, "store": HOST if store == "host" else device, "canvas": HOST}
        with TensorBytes(device_type=device.type) as counter:
            latents = torch.empty(1, SMALL_VAE.latent_channels, *shape, dtype=torch.bfloat16, device=device)
            for piece in vae.decode_pieces(latents, tiling=tiling, **options):
                to_uint8(piece[0])
        return counter.peak_bytes


@pytest.mark.parametrize(
    ("num_frames", "frames", "store", "device_type", "tiling"),
    [
        pytest.param(7, 1, "host", "cuda", Tiling(), marks=SLOW),
        pytest.param(9, 2, "host", "cuda", Tiling(spatial=True), marks=SLOW),
        pytest.param(22, 4, "device", "cpu", Tiling(), marks=SLOW),
        pytest.param(27, 4, "host", "cuda", Tiling(), marks=SLOW),
        pytest.param(9, 1, "device", "cpu", Tiling(spatial=True), marks=SLOW),
        # A long clip of a small autoencoder, whose joined tiles take more than the largest tile.
        pytest.param(49, 4, "device", "cpu", Tiling(spatial=True), marks=SLOW),
        pytest.param(13, 3, "device", "cuda", Tiling(temporal=True), marks=SLOW),
    ],
)
def test_the_largest_tile_and_a_few_chunks_represent_all(
    num_frames: int, frames: int, store: str, device_type: str, tiling: Tiling
):
    shape = num_frames, 5, 4
    need = autoencoder.decoding_need(
        SMALL_VAE.replace({"spatial_tiling": tiling.spatial, "temporal_tiling": tiling.temporal}),
        (4, *shape),
        (20, 16),
        torch.bfloat16,
        device_type,
        chunk_frames=frames,
        store_on_host=store == "host",
    )
    whole = decoded_on_outlines(shape, tiling, device_type, frames=frames, store=store)
    assert need.data + need.activations == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [{"video.width": 80, "video.height": 64}, pytest.param(HIGH_COMPRESSION, marks=SLOW)],
    ids=["demo", "dc_ae"],
)
def test_encoding_takes_what_was_estimated(changes: dict[str, object]):
    plan = plan_of({"condition.mode": "v2v_head", "condition.references": ("any.mp4",), **changes})
    assert beside_weights(estimated(plan, OffloadPlan())["encode"]) == pytest.approx(encode_peak(plan), rel=TOLERANCE)


def test_reading_the_prompts_takes_what_was_estimated():
    plan = plan_of({"text.t5_max_length": 24})
    record = Events(SilentReporter())
    with LoadedModels(stay=True) as models, models.text_encoders(plan, record) as encoders:
        expected = counted(lambda: text_embeds(plan, models, record))
    stage = estimated(plan, OffloadPlan())["text"]
    assert beside_weights(stage) == pytest.approx(expected, rel=TOLERANCE)
    assert stage.weight_bytes == sum(weight.nbytes for encoder in encoders for weight in encoder.model.parameters())


@SLOW
def test_ranks_share_the_text_encoder_as_far_as_it_has_heads():
    layers = load_t5(plan_of({})).blocks
    whole = sum(weight.nbytes for weight in layers.parameters())
    alone, three, four, five = (
        estimated(plan_of({"parallel.gpus": ranks}), OffloadPlan())["text"].weight_bytes for ranks in (1, 3, 4, 5)
    )
    # Of four heads, two of three ranks have one, and five cannot share them.
    assert 1 / 2 < (alone - three) / whole < 2 / 3
    assert (alone - four) / whole == pytest.approx(3 / 4, abs=0.02)
    assert alone == five


@pytest.mark.parametrize(
    ("resident", "in_8_bits", "linear"),
    [
        (1, False, LinearProducts.EXACT),
        (3, True, LinearProducts.EXACT),
        pytest.param(100, False, LinearProducts.EXACT, marks=SLOW),
        (3, False, LinearProducts.INT8),
        pytest.param(1, True, LinearProducts.FP8, marks=SLOW),
    ],
)
def test_weights_of_offloaded_blocks_are_what_streaming_holds(resident: int, in_8_bits: bool, linear: LinearProducts):
    plan = plan_of({})
    offload = OffloadPlan(mode=OffloadMode.BLOCKS, resident_blocks=resident, fp8_storage=in_8_bits, linear=linear)
    transformer = MMDiT(mmdit_config(plan.settings.model)).to(plan.hardware.dtype).requires_grad_(False).eval()
    stacks = [transformer.double_blocks, transformer.single_blocks]
    blocks = [block for stack in stacks for block in stack]
    rest = storage_bytes(transformer.parameters()) - sum(storage_bytes(block.parameters()) for block in blocks)
    if linear is not LinearProducts.EXACT:
        for stack in repeated_blocks(transformer.config):
            for block in transformer.get_submodule(stack.module_path).children():
                use_in_block(block, stack, linear)
    if in_8_bits:
        for block in blocks:
            store_in_fp8(block)
    with stream_blocks(stacks, device="cpu", resident=resident, source="mapped") as figures:
        held = figures.device_bytes
    # 8 bits are multiplied on a GPU only.
    device_type = "cpu" if linear is LinearProducts.EXACT else "cuda"
    assert estimated(plan, offload, device_type)["denoise"].weight_bytes == rest + held


def test_models_stay_where_nothing_is_offloaded():
    plan = plan_of({"condition.mode": "i2v_head", "condition.references": ("any.png",)})
    none, model = (estimated(plan, OffloadPlan(mode=mode)) for mode in (OffloadMode.NONE, OffloadMode.MODEL))
    assert list(none) == ["text", "encode", "denoise", "decode"]
    assert none["denoise"].weight_bytes - model["denoise"].weight_bytes == none["decode"].weight_bytes > 0


def test_of_the_text_encoder_only_some_layers_stay_when_it_is_streamed():
    plan = plan_of({})
    layers = load_t5(plan).blocks
    whole, streamed = (estimated(plan, OffloadPlan(stream_text=chosen))["text"] for chosen in (False, True))
    saved = sum(weight.nbytes for weight in layers.parameters())
    held = streaming_bytes([slot_bytes(layer) for layer in layers], resident=2)
    assert whole.weight_bytes - streamed.weight_bytes == saved - held


@SLOW
def test_on_cuda_the_host_holds_pixels_and_waiting_frames():
    sizes = {"video.num_frames": 9, "vae.block_out_channels": (8, 16, 32), "vae.layers_per_block": 1}
    plan = plan_of(sizes)
    offloads = OffloadPlan(chunk_frames=4), OffloadPlan(chunk_frames=4, store_on_host=True)
    on_cpu = estimated(plan, offloads[0])["decode"]
    on_device, on_host = (estimated(plan, offload, "cuda")["decode"] for offload in offloads)
    latents = 4 * prod(plan.latent_shape)
    assert on_device.data_bytes == latents
    assert on_cpu.data_bytes == latents
    assert beside_weights(on_host) < beside_weights(on_device)
