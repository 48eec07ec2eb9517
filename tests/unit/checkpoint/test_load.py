"""Loading weights: strict, streamed, memory-mapped, and plain about broken files."""

import json
import struct
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from opensora_cli.checkpoint.load import OpenTensors, load_into_module, read_weights
from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import CheckpointError


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.first.bias.requires_grad_(False)


def on_meta():
    with torch.device("meta"):
        return Small()


@pytest.fixture
def weights():
    torch.manual_seed(0)
    model = Small()
    model.inner[1].num_batches_tracked += 7
    return model.state_dict()


@pytest.fixture
def file(tmp_path, weights):
    path = tmp_path / "small.safetensors"
    save_file(weights, path)
    return path


def load(model, path, **options):
    load_into_module(model, path, **({"device": "cpu", "dtype": torch.float32} | options))
    return model


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_programs_around_the_model_are_taken_off(tmp_path, weights, prefix):
    path = tmp_path / "wrapped.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()}, path)
    model = on_meta()
    load_into_module(model, path, device="cpu", dtype=torch.float32)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    # Of some names only, it is a part of the name.
    save_file({f"{prefix}{name}" if "inner" in name else name: tensor for name, tensor in weights.items()}, path)
    with pytest.raises(CheckpointError, match="missing"):
        load_into_module(on_meta(), path, device="cpu", dtype=torch.float32)


def test_loaded_weights_can_be_changed_without_changing_the_file(file, weights):
    model = load(on_meta(), file)
    with torch.no_grad():
        model.first.weight.add_(1)
    assert torch.equal(load(on_meta(), file).first.weight, weights["first.weight"])


def test_only_floating_point_is_converted(file, weights):
    model = load(on_meta(), file, dtype=torch.bfloat16)
    assert torch.equal(model.first.weight, weights["first.weight"].bfloat16())
    assert model.inner[1].num_batches_tracked.dtype == torch.int64
    assert model.inner[1].num_batches_tracked == 7


def test_what_is_kept_on_the_host_stays_a_map_of_the_file(file, weights):
    model = load(on_meta(), file, device="meta", keep_on_host=["inner.*"])
    assert model.first.weight.is_meta
    assert model.first.bias.is_meta
    kept = model.inner.state_dict()
    assert len(kept) == 7
    assert all(torch.equal(kept[key], weights[f"inner.{key}"]) for key in kept)
    # All of them views of one map.
    assert {tensor.untyped_storage().nbytes() for tensor in kept.values()} == {file.stat().st_size}


@pytest.fixture
def part(tmp_path, weights):
    path = tmp_path / "part.safetensors"
    save_file({key: tensor for key, tensor in weights.items() if not key.startswith("first")}, path)
    return path


class TestConversion:
    def test_one_tensor_at_a_time_is_held(self, file):
        made, alive = [], []

        def copy(tensors):
            for key in tensors:
                tensor = tensors[key].clone()
                if tensor.is_floating_point():
                    made.append(weakref.ref(tensor))
                yield key, tensor

        def watch(_):
            alive.append(sum(reference() is not None for reference in made))

        load(on_meta(), file, dtype=torch.float64, convert=copy, advance=watch)
        assert max(alive) == 1

    def test_no_weight_is_read_before_all_shapes_are_known_to_fit(self, file):
        devices = []

        def watch(tensors):
            for key in tensors:
                devices.append(tensors[key].device.type)
                yield (key if key != "first.bias" else "first.bios"), tensors[key]

        with pytest.raises(CheckpointError, match=r"first\.bios"):
            load(on_meta(), file, convert=watch)
        assert set(devices) == {"meta"}


class TestStrictness:
    def test_every_kind_of_mismatch_is_in_one_line(self, tmp_path, weights):
        path = tmp_path / "other.safetensors"
        weights["first.weight"] = torch.zeros(3, 5)
        weights["second.weight"] = weights.pop("first.bias")
        save_file(weights, path)
        model = on_meta()
        with pytest.raises(CheckpointError) as caught:
            load(model, path)
        assert caught.value.exit_code == 3
        assert caught.value.message == (
            f"{path} does not fit the model: 1 missing (first.bias); 1 unexpected (second.weight); "
            "1 of another shape (first.weight: file [3, 5], model [3, 4])"
        )
        assert model.first.weight.is_meta

    def test_what_may_be_missing_starts_at_zero(self, part, weights):
        with pytest.raises(CheckpointError, match="2 missing"):
            load(on_meta(), part)
        with pytest.raises(CheckpointError, match="1 missing"):
            dict(read_weights(on_meta(), part, dtype=torch.float32, allowed_missing=["first.bias"]))
        found = dict(read_weights(on_meta(), part, dtype=torch.float32, allowed_missing=["first.*"]))
        assert torch.equal(found["first.weight"], torch.zeros(3, 4))
        assert torch.equal(found["inner.0.weight"], weights["inner.0.weight"])

    def test_buffers_that_no_file_can_fill_are_refused(self, file):
        model = on_meta()
        model.register_buffer("table", torch.zeros(3, device="meta"), persistent=False)
        with pytest.raises(ValueError, match="table"):
            load(model, file)


class TestFilesThatChange:
    def test_before_it_is_mapped(self, file):
        tensors = OpenTensors(open_checkpoint(file).entries)
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 8)
        with pytest.raises(CheckpointError, match="has become shorter while it was read"):
            [*tensors.values()]

    def test_one_that_is_replaced_stays_for_who_maps_it(self, file, weights):
        module = load(on_meta(), file).requires_grad_(False).eval()
        expected = module.first(torch.ones(1, 4))
        other = file.with_name("other")
        save_file({name: tensor + 1 for name, tensor in weights.items()}, other)
        other.rename(file)
        assert torch.equal(module.first(torch.ones(1, 4)), expected)
        file.unlink()
        assert torch.equal(module.first(torch.ones(1, 4)), expected)


def test_data_at_odd_addresses_is_aligned(tmp_path):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.0, 2.0))
    with torch.device("meta"):
        model = nn.Linear(2, 1, bias=False)
    load(model, path)
    assert model.weight.tolist() == [[1.0, 2.0]]
    assert model.weight.data_ptr() % 4 == 0
