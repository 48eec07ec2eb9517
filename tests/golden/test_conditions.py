"""Conditioning masks and reference latents of every mode against the recorded ones."""

import re

import pytest
import torch

from opensora_cli.core.conditions import Source, condition_mode
from opensora_cli.sampling.conditioning import prepare_inference_condition


def _references(inputs, mode):
    """What the reference implementation was given for each sample: a video, or the first and the last picture."""
    kind = r"video(\d+)" if mode.source is Source.VIDEO else r"image(\d+)_\d+"
    samples = {}
    for name in sorted(inputs):
        if match := re.fullmatch(kind, name):
            samples.setdefault(int(match[1]), []).append(inputs[name])
    return [samples[index] for index in sorted(samples)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "noncausal"])
def test_conditions(golden, assert_close, causal):
    file = golden("conditions")
    suffix = f"_{'causal' if causal else 'noncausal'}.mask"
    names = [key.removesuffix(suffix) for key in file.outputs if key.endswith(suffix)]
    if not names:
        pytest.skip(f"no mode was recorded with the suffix {suffix}")
    for name in names:
        mode = condition_mode(name)
        mask_B1THW, reference_BCTHW = prepare_inference_condition(
            file.inputs["z"], name, _references(file.inputs, mode), causal
        )
        case = name + suffix.removesuffix(".mask")
        # Recorded once for each latent frame: everywhere in a frame the mask is the same.
        assert torch.equal(mask_B1THW.amin(dim=(3, 4)), mask_B1THW.amax(dim=(3, 4))), case
        assert_close(mask_B1THW[..., 0, 0], file.outputs[f"{case}.mask"], what=f"{case}.mask")
        assert_close(reference_BCTHW, file.outputs[f"{case}.masked_latents"], what=f"{case}.masked_latents")


def test_as_many_modes_as_recorded(golden):
    file = golden("conditions")
    if "modes" not in file.config:
        pytest.skip("the number of modes was not recorded")
    recorded = {re.sub(r"_(non)?causal\..*", "", key) for key in file.outputs}
    assert len(recorded) == file.config["modes"]
