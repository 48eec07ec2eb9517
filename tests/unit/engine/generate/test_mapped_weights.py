"""Weights on a CPU: computed with where they are mapped, cast only if they must be, and looked after until the end."""

import sys
from dataclasses import replace

import pytest
import torch
from mapped_memory import NO_FILE, are_mapped, mapped_files, needs_maps
from tiny_weights import write_holes
from tiny_world import released_settings

from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate import models
from opensora_cli.engine.generate.models import host_modulation, streamed_blocks
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.run import generate
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.settings.devices import HostWeights, OffloadMode

BF16 = {"runtime__dtype": "bfloat16"}
LARGE = {"model__depth": "3", "model__depth_single_blocks": "16", "model__hidden_size": "64", "model__num_heads": "4"}


def private_bytes(tensors):
    """Return the bytes of tensors that are in no file, and of a file's pages that were written to."""
    tensors = list(tensors)
    files, copied = mapped_files(tensors)
    return copied + sum(tensor.nbytes for tensor, file in zip(tensors, files, strict=True) if file == NO_FILE)


def bytes_of(*modules):
    return sum(weight.nbytes for module in modules for weight in module.parameters())


def waiting_bytes(transformer, made):
    """Return the bytes of the layers of modulation, which run before the first step alone."""
    return bytes_of(*host_modulation(transformer, made.offload))


def stage(made, name="denoise"):
    return next(each for each in made.stages if each.name == name)


@pytest.fixture
def large(world, tmp_path):
    """Settings of a transformer of many blocks, in a sparse file in bfloat16."""

    def make(**changes):
        settings = released_settings(world, tmp_path / "out", **LARGE, **changes)
        path = tmp_path / "large.safetensors"
        if not path.exists():
            write_holes(path, transformer_on_meta(settings.model).state_dict(), dtype="BF16")
        return settings.replace({"files.transformer": str(path)})

    return make


@needs_maps
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's account of memory")
class TestOfTheFilesDtype:
    def test_no_weight_of_the_transformer_is_private(self, large):
        made = make_plan(large(**BF16))
        transformer = models.load_transformer(made)
        weights = list(transformer.state_dict().values())
        assert sum(float(weight.float().sum()) for weight in weights) == 0  # touches every page
        assert are_mapped(weights, made.weights.path(Component.TRANSFORMER))
        assert private_bytes(weights) == 0
        assert stage(made).weight_bytes == 0
        assert stage(made).mapped_bytes == sum(weight.nbytes for weight in weights)

    @pytest.mark.parametrize("asked", [{"memory__offload": "blocks"}, {"memory__resident_blocks": "2"}], ids=str)
    def test_asking_for_offloaded_blocks_has_no_effect(self, world, tmp_path, reporter, asked):
        result = generate(released_settings(world, tmp_path, **BF16, **asked), reporter=reporter)
        [(name, value)] = asked.items()
        assert f"memory: {name.replace('__', '.')}={value} has no effect on a CPU" in "\n".join(reporter.notes)
        assert "offload" not in result.timings_s

    def test_the_result_is_that_of_copied_weights(self, world, tmp_path, monkeypatch):
        settings = released_settings(world, tmp_path, **BF16, output__save_latents="true", output__format="png")
        mapped = generate(settings.replace({"output.path": str(tmp_path / "mapped")}))
        load_transformer = models.load_transformer

        def copied(*args, **options):
            transformer = load_transformer(*args, **options)
            for weight in transformer.parameters():
                weight.data = weight.data.clone()
            assert private_bytes(transformer.parameters()) > 0
            return transformer

        monkeypatch.setattr(models, "load_transformer", copied)
        other = generate(settings.replace({"output.path": str(tmp_path / "copied")}))
        first, second = (sorted(result.videos[0].path.iterdir()) for result in (mapped, other))
        assert len(first) == 9
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@needs_maps
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's account of memory")
class TestOfAnotherDtype:
    def test_blocks_stay_mapped_until_they_are_cast(self, large):
        made = make_plan(large())
        made = made.with_offload(
            replace(made.offload, mode=OffloadMode.BLOCKS, resident_blocks=1, host_weights=HostWeights.MAPPED)
        )
        transformer = models.load_transformer(made)
        blocks = [block for stack in (transformer.double_blocks, transformer.single_blocks) for block in stack]
        weights = [weight for block in blocks for weight in block.parameters()]
        assert {weight.dtype for weight in weights} == {torch.bfloat16}
        assert private_bytes(weights) == 0
        waiting = waiting_bytes(transformer, made)
        final = bytes_of(transformer.final_layer.adaLN_modulation)
        in_blocks = bytes_of(*blocks) - (waiting - final)
        outside = bytes_of(transformer) - in_blocks - waiting
        with TensorBytes() as counter, streamed_blocks(made, transformer) as figures:
            assert figures.host_bytes == 0
            assert figures.device_bytes <= counter.live_bytes <= figures.device_bytes + 2 * 4096
        assert stage(made).weight_bytes == outside + figures.device_bytes
        assert stage(made).mapped_bytes == bytes_of(transformer) - outside // 2
        whole = made.with_offload(replace(made.offload, mode=OffloadMode.NONE))
        assert stage(whole).weight_bytes == outside + 2 * (in_blocks + waiting)
        assert stage(whole).mapped_bytes == 0

    def test_8_bits_are_made_block_by_block(self, large):
        made = make_plan(large(memory__fp8_storage="true"))
        with TensorBytes(device_type="cpu") as counter:
            transformer = models.load_transformer(made)
            held = counter.live_bytes
        largest = max(sum(4 * weight.numel() for weight in block.parameters()) for block in transformer.double_blocks)
        assert held == pytest.approx(stage(made).weight_bytes, rel=0.1)
        assert counter.peak_bytes < held + 2 * largest
