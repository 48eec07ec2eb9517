"""Models in little memory on a CUDA device: the same results, and what the allocator saw."""

import pytest
import torch

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.models.vae.config import HunyuanVAEConfig, Tiling
from opensora_cli.models.vae.hunyuan import HunyuanVAE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return HunyuanVAE(HunyuanVAEConfig()).to(CUDA, torch.bfloat16).requires_grad_(False)


def latents_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(CUDA, torch.bfloat16)


def measured(run):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def test_chunks_in_page_locked_memory_give_the_same_pixels(vae):
    latents = latents_of(1, 16, 9, 16, 16)
    # Exact in fp32, so that a copy that came too late cannot hide in rounding.
    exact = HunyuanVAE(vae.config).to(CUDA).requires_grad_(False)
    exact.load_state_dict(vae.state_dict())
    with torch.backends.cudnn.flags(allow_tf32=False):
        whole = exact.decode(latents.float())
        for chunk_frames in (1, 3):
            chunked = exact.decode(latents.float(), chunk_frames=chunk_frames, store=CPU, canvas=CPU)
            assert chunked.device == CPU
            assert (chunked - whole.cpu()).abs().max() < 1e-4 * whole.abs().max()


def test_chunks_take_a_part_of_the_memory(vae):
    latents = latents_of(1, 16, 17, 32, 32)
    whole, whole_bytes = measured(lambda: vae.decode(latents))
    on_device, device_bytes = measured(lambda: vae.decode(latents, chunk_frames=4, canvas=CPU))
    on_host, host_bytes = measured(lambda: vae.decode(latents, chunk_frames=4, store=CPU, canvas=CPU))
    assert torch.equal(on_device, on_host)
    assert (on_device - whole.cpu()).abs().mean() < 0.02 * whole.abs().max()
    assert device_bytes < 0.6 * whole_bytes
    assert host_bytes < 0.2 * whole_bytes


def test_tiles_on_the_canvas(vae):
    latents, tiling = latents_of(1, 16, 5, 56, 56), Tiling(spatial=True)
    on_device, device_bytes = measured(lambda: vae.decode(latents, tiling=tiling))
    on_canvas, canvas_bytes = measured(lambda: vae.decode(latents, tiling=tiling, canvas=CPU))
    assert on_canvas.device == CPU
    # Where tiles meet, another device blends them, in bf16.
    assert (on_canvas - on_device.cpu()).abs().max() < 0.02 * on_device.abs().max()
    assert canvas_bytes < device_bytes


@pytest.mark.parametrize(("depth", "depth_single_blocks"), [(1, 0), (0, 1)])
def test_a_block_at_768px_in_chunks(depth, depth_single_blocks):
    config = MMDiTConfig(depth=depth, depth_single_blocks=depth_single_blocks, cond_embed=False)
    torch.manual_seed(0)
    with CUDA:
        model = MMDiT(config).bfloat16().requires_grad_(False)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        given = {
            "position_ids_BN3": torch.randint(0, 60, (1, 76_032, 3)),
            "timesteps_B": torch.tensor([0.5]),
            "prompt_embeds_BLC": torch.randn(1, 512, 4096, dtype=torch.bfloat16),
            "pooled_prompt_embeds_BV": torch.randn(1, 768, dtype=torch.bfloat16),
        }
        latents = torch.randn(1, 76_032, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        whole, whole_bytes = measured(lambda: model(latents, **given))
        model.set_sequence_chunk(8192)
        chunked, chunked_bytes = measured(lambda: model(latents, **given))
    assert (chunked - whole).abs().max() <= 0.02 * whole.abs().max()
    assert whole_bytes < 6.5 * 2**30
    assert chunked_bytes < 3 * 2**30
