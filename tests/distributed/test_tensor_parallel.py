"""What ranks hold of a transformer whose heads and features are divided; `test_sequence` has its velocities."""

from pathlib import Path

import torch
import torch.distributed as dist
from shared_models import Scheme, shard_transformer
from storage_sizes import storage_bytes
from tiny_transformer import linears_of_blocks, transformer
from torch import nn

from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.mmdit.blocks import repeated_blocks


def _block_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the linear layers of the plan, and of all else."""
    planned = {
        id(weight) for path in linears_of_blocks(model.config) for weight in model.get_submodule(path).parameters()
    }
    bytes_of = {id(weight): weight.nbytes for weight in model.parameters()}
    return sum(bytes_of[key] for key in planned), sum(size for key, size in bytes_of.items() if key not in planned)


def _weights_per_rank() -> tuple[int, int, int, int]:
    model = transformer()
    before, rest_before = _block_bytes(model)
    shard_transformer(model, Scheme(tensor=dist.get_world_size()).mesh().group("tensor"))
    after, rest = _block_bytes(model)
    assert rest == rest_before
    assert storage_bytes(model.parameters()) == after + rest
    row_biases = sum(
        model.get_submodule(f"{stack.module_path}.{index}.{plan.path}").bias.nbytes
        for stack in repeated_blocks(model.config)
        for index in range(stack.count)
        for plan in stack.linears
        if plan.split == "row"
    )
    return before, after, rest, row_biases


def test_each_rank_has_its_share_of_the_weights(pool):
    for before, after, _, row_biases in pool(4).run(_weights_per_rank):
        assert after == (before - row_biases) // 4 + row_biases


def _mapped(file: str) -> tuple[int, int]:
    model = transformer()
    mapped = torch.from_file(file, shared=True, size=Path(file).stat().st_size, dtype=torch.uint8)
    start = 0
    for weight in model.parameters():
        weight.data = mapped[start : start + weight.nbytes].view(torch.float32).view(weight.shape)
        start += weight.nbytes
    with TensorBytes(device_type="cpu") as counted:
        shard_transformer(model, Scheme(tensor=2).mesh().group("tensor"))
    copied = [weight for weight in model.parameters() if weight.untyped_storage().nbytes() == weight.nbytes]
    return counted.peak_bytes, storage_bytes(copied)


def test_of_mapped_weights_only_the_share_is_copied(pool, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(sum(weight.nbytes for weight in transformer().parameters())))
    for (peak, copied), (_, after, _, row_biases) in zip(
        pool(2).run(_mapped, str(file)), pool(2).run(_weights_per_rank), strict=True
    ):
        assert peak == copied == after - row_biases
