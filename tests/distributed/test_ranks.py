"""Work that the ranks of a generation share, beside the transformer's: branches of guidance, and tiles."""

import pytest
import torch
import torch.distributed as dist
from small_hunyuan import SMALL_HUNYUAN

from opensora_cli.core.rank_messages import broadcast_tensors
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.launch.rank import agreed
from opensora_cli.models.vae.config import DCAEConfig
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.models.vae.tiles import Tiling
from opensora_cli.parallel.divided_work import SharedBranches, SharedDecoder
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.sampling.guidance import Branch
from opensora_cli.settings.devices import MemorySettings

CPU = torch.device("cpu")


def ranks():
    return Ranks(MeshShape(guidance=dist.get_world_size()), CPU)


def _agreed():
    rank = dist.get_rank()
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(1, dtype=torch.bfloat16)] if rank == 0 else None
    own = MemorySettings(limit=f"{rank + 1}GiB")
    return ranks().is_main, agreed(own), broadcast_tensors(tensors, device=CPU)


def test_the_value_of_rank_0_is_agreed(pool):
    answers = pool(2).run(_agreed)
    assert [main for main, *_ in answers] == [True, False]
    for _, value, (first, second) in answers:
        assert value == MemorySettings(limit="1GiB")
        assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (second.dtype, second.tolist()) == (torch.bfloat16, [1])


def _branches(branches):
    group = ranks().mesh.group("guidance")
    computed = []

    def velocity(packed_latents_1ND, t, branches):
        computed.extend(branches)
        return {branch: packed_latents_1ND * list(Branch).index(branch) + t for branch in branches}

    shared = SharedBranches(velocity, group)(torch.ones(1, 4, 3), 0.5, tuple(branches))
    return computed, shared


def test_branches_are_shared(pool):
    for branches in (list(Branch), [Branch.UNCOND, Branch.COND], [Branch.COND]):
        answers = pool(2).run(_branches, branches)
        assert [computed for computed, _ in answers] == [branches[::2], branches[1::2]]
        for _, shared in answers:
            assert list(shared) == branches
            for branch, velocity in shared.items():
                assert torch.equal(velocity, torch.full((1, 4, 3), list(Branch).index(branch) + 0.5))


def tiny_vae():
    torch.manual_seed(1)
    return HunyuanVAE(SMALL_HUNYUAN).requires_grad_(False).eval()


def tiny_dc_ae():
    sizes = {"latent_channels": 4, "block_types": ("res", "res", "res"), "width_list": (8, 8, 8)}
    depths = {"encoder_depth_list": (1, 1, 1), "decoder_depth_list": (1, 1, 1), "temporal": (True, True, False)}
    torch.manual_seed(1)
    vae = DCAE(DCAEConfig(**sizes, **depths, spatial_tile_size=16, temporal_tile_size=16))
    return vae.requires_grad_(False).eval()


def _decoded(make, shared, temporal):
    vae, latents = make(), torch.randn(1, 4, 6, 5, 6, generator=torch.Generator().manual_seed(2))
    runs = 0

    def count(*_):
        nonlocal runs
        runs += 1

    vae.decoder.register_forward_hook(count)
    tiling = Tiling(spatial=True, temporal=temporal)
    if shared:
        decoder = vae.decoder = SharedDecoder(vae)
    pixels = torch.cat(list(vae.decode_pieces(latents, tiling=tiling, canvas=CPU)), dim=2)
    if shared:
        decoder.wait()
    return runs, None if pixels.is_meta else pixels


@pytest.mark.parametrize("make", [tiny_vae, tiny_dc_ae])
def test_tiles_are_shared(pool, make):
    for temporal in (False, True):
        ((alone, expected),) = pool(1).run(_decoded, make, False, temporal)
        (first, pixels), (second, outline) = pool(2).run(_decoded, make, True, temporal)
        assert torch.equal(pixels, expected)
        assert outline is None
        assert first + second == alone >= 4
        assert abs(first - second) <= 1
