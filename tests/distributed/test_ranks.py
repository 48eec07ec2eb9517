"""What ranks send each other, and work that they share beside the transformer's: branches of guidance, and tiles."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_autoencoders import SMALL_DC_AE, SMALL_HUNYUAN

import opensora_cli
from opensora_cli.core.rank_messages import all_gather_json, broadcast_json, broadcast_tensors
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.launch.rank import agreed
from opensora_cli.models.vae.config import Tiling
from opensora_cli.models.vae.dc_ae import DCAE
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.parallel.divided_work import SharedBranches, SharedDecoder
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.sampling.guidance import Branch
from opensora_cli.settings.devices import MemorySettings

CPU = torch.device("cpu")


def ranks():
    return Ranks(CPU, MeshShape(guidance=dist.get_world_size()))


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


def _decoded(model, config, shared, temporal):
    torch.manual_seed(1)
    vae = model(config).requires_grad_(False).eval()
    latents = torch.randn(1, config.latent_channels, 6, 5, 6, generator=torch.Generator().manual_seed(2))
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


@pytest.mark.parametrize(("model", "config"), [(HunyuanVAE, SMALL_HUNYUAN), (DCAE, SMALL_DC_AE)])
def test_tiles_are_shared(pool, model, config):
    for temporal in (False, True):
        ((alone, expected),) = pool(1).run(_decoded, model, config, False, temporal)
        (first, pixels), (second, outline) = pool(2).run(_decoded, model, config, True, temporal)
        assert torch.equal(pixels, expected)
        assert outline is None
        assert first + second == alone >= 4
        assert abs(first - second) <= 1


VALUES = [None, 0.1, "\ud83d snow ❄", ["a", 1, None, {"b": [True]}]]


def _told(values):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([ranks - 2, ranks - 1])
    from_first = [broadcast_json(value if rank == 0 else "not this") for value in values]
    gathered = all_gather_json("x" * rank)
    in_pair = (broadcast_json(rank, pair), all_gather_json([rank], pair)) if rank >= ranks - 2 else None
    dist.barrier()
    return from_first, gathered, in_pair


def test_all_ranks_of_a_group_hear_its_first_rank_and_each_other(pool):
    for rank, (from_first, gathered, in_pair) in enumerate(pool(4).run(_told, VALUES)):
        assert from_first == VALUES
        assert gathered == ["", "x", "xx", "xxx"]
        assert in_pair == ((2, [[2], [3]]) if rank >= 2 else None)


def test_nothing_of_ours_sends_objects_as_pickles():
    package = Path(opensora_cli.__file__).parent
    found = [
        path
        for path in package.rglob("*.py")
        if re.search(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(", path.read_text("utf-8"))
    ]
    assert found == []
