"""Checkpoints of torch.distributed that several ranks wrote together."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from opensora_cli.checkpoint.opening import open_checkpoint


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.rand(8, 3, generator=generator),
        "uneven": torch.rand(5, 2, generator=generator),
        "columns": torch.rand(3, 7, generator=generator).bfloat16(),
        "deep": torch.rand(2, 3, 5, generator=generator),
        "flat": torch.arange(9),
        "one": torch.rand(1, 4, generator=generator),
        "whole": torch.rand(6, generator=generator),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
    }


_CUTS = {"rows": 0, "uneven": 0, "columns": 1, "deep": 2, "flat": 0, "one": 0}


def _save(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {
        name: distribute_tensor(tensor, mesh, [Shard(_CUTS[name]) if name in _CUTS else Replicate()])
        for name, tensor in _tensors().items()
    }
    dcp.save({"model": model, "step": 3}, checkpoint_id=folder)


def test_tensors_are_put_together(pool, tmp_path):
    pool(4).run(_save, str(tmp_path))
    opened = open_checkpoint(tmp_path)
    assert len(opened.files) == 4 + 1
    assert list(opened.entries) == list(_tensors())
    for name, tensor in _tensors().items():
        entry = opened.entries[name]
        assert (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(entry.read(), tensor)
