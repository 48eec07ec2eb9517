"""The layers of an adapter, found in a model of another layout by the names that other trainers give them."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from adapter_styles import ALPHA, RANK, STYLES, Factors, fused_factors, kohya, write_styles
from closeness import assert_close
from safetensors.torch import save_file
from tiny_adapters import draw
from tiny_transformer import transformer
from tiny_weights import held, read
from torch import Tensor

from opensora_cli.checkpoint.lora import merge, open_adapter
from opensora_cli.core.choices import QKV
from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.ckpt.convert import change_layout
from opensora_cli.engine.components.loras import fit_to_model

HIDDEN = 32
SPLIT = {name: weight.detach().double() for name, weight in transformer(depth=1, single=2).named_parameters()}


def in_layout(state: Mapping[str, Tensor], qkv: QKV) -> dict[str, Tensor]:
    return read(change_layout(held(state), qkv))


@pytest.fixture(scope="module")
def flux() -> dict[str, Tensor]:
    """The transformer as files of Flux have it: the same function."""
    return in_layout(SPLIT, QKV.FUSED)


@pytest.fixture(scope="module")
def factors_of_flux(flux) -> Factors:
    return fused_factors(flux, like=r".*blocks.*|img_in|time_in\.out_layer|final_layer.*")


@pytest.fixture(scope="module")
def merged_by_hand(flux, factors_of_flux) -> dict[str, Tensor]:
    """What the adapter makes of the fused weights, which is what it was trained for."""
    merged = dict(flux)
    for path, (a, b) in factors_of_flux.items():
        merged[f"{path}.weight"] = flux[f"{path}.weight"] + ALPHA / RANK * (b.double() @ a.double())
    return merged


@pytest.fixture(scope="module")
def styles(factors_of_flux, tmp_path_factory) -> dict[str, Path]:
    return write_styles(tmp_path_factory.mktemp("styles"), factors_of_flux, hidden=HIDDEN)


def fitted(path: Path, state: Mapping[str, Tensor]):
    return fit_to_model(open_adapter(path), {name: tuple(each.shape) for name, each in state.items()})


@pytest.mark.parametrize("style", STYLES)
def test_every_style_fits_every_layout(style, flux, merged_by_hand, styles):
    layers = [
        name for name in flux if re.match(r".*blocks.*weight|(img_in|time_in.out_layer|final_layer.*).weight", name)
    ]
    for qkv in QKV:
        state = in_layout(flux, qkv)
        found = read(merge(held(state), fitted(styles[style], state)))
        expected = in_layout(merged_by_hand, qkv)
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert_close(weight, expected[name])
        if qkv is QKV.FUSED:
            assert [name for name in found if not torch.equal(found[name], flux[name])] == layers


def test_names_behind_a_prefix(flux, merged_by_hand, styles):
    prefixed = {f"model.diffusion_model.{name}": weight for name, weight in flux.items()}
    found = read(merge(held(prefixed), fitted(styles["kohya"], prefixed)))
    for name, weight in merged_by_hand.items():
        assert_close(found[f"model.diffusion_model.{name}"], weight)


def test_what_is_not_found_keeps_its_name(tmp_path):
    pair = draw(2, HIDDEN), draw(HIDDEN, 2)
    # Neither is taken apart: blocks_0 has no layer img_attn_q, and there is no block 7.
    paths = {"double_blocks.0.img_attn.q": pair, "double_blocks.7.img_attn.q_proj": pair}
    save_file(kohya(paths), tmp_path / "a.safetensors")
    assert list(fitted(tmp_path / "a.safetensors", SPLIT).updates) == [
        "lora_unet_double_blocks_0_img_attn_q.weight",
        "lora_unet_double_blocks_7_img_attn_q_proj.weight",
    ]


def test_names_that_mean_two_layers_are_refused(tmp_path):
    state = {"a.b_c.weight": draw(6, 5), "a_b.c.weight": draw(6, 5)}
    save_file(kohya({"a.b.c": (draw(2, 5), draw(6, 2))}), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"'lora_unet_a_b_c' can mean a\.b_c or a_b\.c"):
        fitted(tmp_path / "a.safetensors", state)


@pytest.mark.parametrize("rows", [HIDDEN, 3 * HIDDEN + 1])
def test_fused_layers_of_another_width_are_refused(tmp_path, rows):
    tensors = kohya({"double_blocks.0.img_attn.qkv": (draw(2, HIDDEN), draw(rows, 2))})
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"has 96 rows there \(adapter: A \[2, 32\], B \[{rows}, 2\]\)"):
        fitted(tmp_path / "a.safetensors", SPLIT)
