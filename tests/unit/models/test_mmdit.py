"""The MMDiT's own promises: attention, precision, initialisation, layouts, and the plain-data tables."""

import pytest
import torch
from closeness import assert_close
from pydantic import ValidationError
from tiny_transformer import inputs, transformer
from torch import nn

from opensora_cli.models.mmdit.layers import HeadNorm, modulated_norm, rotated_heads, tanh_gelu
from opensora_cli.models.mmdit.model import rotary_angles, sinusoidal_embedding


def run(model, given, **changes):
    given = given | changes
    latents = given.pop("packed_latents_BND")
    return model(latents, **given)


class TestPredictedData:
    """A model whose last layer puts out the data."""

    def both(self, **changes):
        """What the last layer puts out, and the velocity that a model with the same weights makes of it."""
        model = transformer()
        given = inputs(model) | changes
        return given, run(model, given), run(transformer(predicts_data=True), given)

    def test_the_velocity_leads_from_the_sample_to_the_data(self):
        given, data, velocity = self.both()
        sample, t_B11 = given["packed_latents_BND"], given["timesteps_B"].view(-1, 1, 1)
        assert_close(sample - t_B11 * velocity, data)


class TestPrecision:
    def test_time_is_rounded_to_the_models_dtype_before_the_factor(self):
        t = torch.tensor([0.5019])  # bf16 knows 0.5 and 0.50390625
        rounded = sinusoidal_embedding(t, dtype=torch.bfloat16)
        assert torch.equal(rounded, sinusoidal_embedding(t.bfloat16().float(), dtype=torch.float32).bfloat16())
        assert (rounded.float() - sinusoidal_embedding(t, dtype=torch.float32)).abs().max() > 1.0

    def test_autocast_keeps_the_residual_stream_in_fp32(self):
        model = transformer()
        streams = []
        for block in model.single_blocks:
            block.register_forward_hook(lambda module, args, out: streams.append(out.dtype))
        for block in model.double_blocks:
            block.register_forward_hook(lambda module, args, out: streams.extend(x.dtype for x in out))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            velocity = run(model, inputs(model))
        assert streams == [torch.float32] * (3 + 2 * 2)
        assert velocity.dtype == torch.float32
        exact = run(model, inputs(model))
        assert (velocity - exact).abs().max() < 0.1 * exact.abs().max()

    def test_epsilon_of_both_norms(self):
        # The golden files do not see it: only values as small as its root do.
        x = torch.tensor([[[3e-3, -1e-3]]])
        variance = torch.tensor(4e-6 + 1e-6)
        layer = modulated_norm(x, shift=torch.tensor(0.5), scale=torch.tensor(1.0))
        assert_close(layer, (x - 1e-3) / variance.sqrt() * 2.0 + 0.5)
        norm = HeadNorm(2)
        nn.init.constant_(norm.scale, 3.0)
        assert_close(norm(x), 3.0 * x / torch.tensor(5e-6 + 1e-6).sqrt())


class TestWithoutGradients:
    """What is computed with less traffic of memory, and in place, where no gradient is recorded."""

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 2**-8)]
    )
    def test_heads_are_normalised_and_rotated_as_with_them(self, dtype, tolerance):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 7, 36, generator=generator)
        x[0, 0] *= 1e-3  # so that the epsilon of the norm counts
        x, norm = x.to(dtype), HeadNorm(12)
        norm.scale.data = torch.rand(12, generator=generator) + 0.5
        rotary = rotary_angles(torch.arange(21).reshape(1, 7, 3), axes_dim=(4, 4, 4), theta=10000)
        expected = rotated_heads(x, norm, rotary)
        before = x.clone()
        with torch.no_grad():
            found = rotated_heads(x, norm, rotary)
        assert found.dtype == dtype
        assert found.shape == (2, 3, 7, 12)
        assert torch.equal(x, before)
        assert_close(found.float(), expected.float(), tolerance=tolerance)

    def test_velocity_is_the_same_and_no_input_changes(self):
        model = transformer()
        given = inputs(model)
        before = {name: tensor.clone() for name, tensor in given.items()}
        inputs_of_blocks = []
        for block in (*model.double_blocks, *model.single_blocks):
            block.register_forward_pre_hook(lambda module, args: inputs_of_blocks.append((args[0], args[0].clone())))
        with torch.no_grad():
            found = run(model, given)
        assert len(inputs_of_blocks) == 2 + 3
        assert all(torch.equal(tensor, copy) for tensor, copy in inputs_of_blocks)
        assert all(torch.equal(given[name], before[name]) for name in given)
        assert_close(found, run(model, given))


class TestInputs:
    @pytest.mark.parametrize(
        ("changes", "name"),
        [({"cond_embed": True}, "conditioning_BNK"), ({"guidance_embed": True}, "embedded_guidance_B")],
    )
    def test_missing_or_useless_input_is_refused(self, changes, name):
        wanting, without = transformer(**({"cond_embed": False} | changes)), transformer(cond_embed=False)
        given = inputs(wanting)
        with pytest.raises(ValueError, match=name):
            run(wanting, given, **{name: None})
        with pytest.raises(ValueError, match=name):
            run(without, inputs(without), **{name: given[name]})


class TestConfig:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_heads": 5}, r"model\.num_heads=5 must divide model\.hidden_size=32"),
            ({"axes_dim": (4, 4, 6)}, r"model\.axes_dim=4,4,6 must be three even numbers .* add up to 8"),
            ({"axes_dim": (3, 5, 4)}, r"model\.axes_dim=3,5,4 must be three even numbers"),
        ],
    )
    def test_contradictions_are_named(self, changes, message):
        with pytest.raises(ValidationError, match=message):
            transformer(**changes)


@pytest.mark.parametrize("tokens", [3, 5000])
def test_gelu_of_a_cpu_is_in_place_and_that_of_torch(tokens):
    wide = torch.linspace(-12, 12, 2 * tokens * 80).view(2, tokens, 80).clone()
    given = wide[..., 16:]
    expected = nn.functional.gelu(given.double(), approximate="tanh").float()
    with torch.no_grad():
        out = tanh_gelu(given)
    assert out.data_ptr() == given.data_ptr()
    assert_close(given, expected, tolerance=1e-6)
