"""The table of condition modes."""

import pytest
import torch

from opensora_cli.core.conditions import (
    CONDITION_MODES,
    T2V,
    ReferenceLengths,
    condition_mode,
    reference_parts,
)
from opensora_cli.core.exceptions import RequestError
from opensora_cli.sampling.conditioning import (
    prepare_inference_condition,
    restore_references,
)

DEMO = ReferenceLengths(video=2, easy=3)
MODES_WITH_REFERENCE = [name for name, mode in CONDITION_MODES.items() if mode.needs_reference]


def _latents(frames, *, batch=1, seed=0):
    return torch.randn(batch, 4, frames, 2, 3, generator=torch.Generator().manual_seed(seed))


def _given_frames(mask_B1THW, sample=0):
    return mask_B1THW[sample, 0, :, 0, 0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("t2v", []),
        ("i2v_head", [0]),
        ("i2v_tail", [4]),
        ("i2v_loop", [0, 4]),
        ("v2v_head", [0, 1, 2]),
        ("v2v_tail", [2, 3, 4]),
        ("v2v_head_easy", [0, 1, 2, 3]),
        ("v2v_tail_easy", [1, 2, 3, 4]),
    ],
)
def test_all_modes_run_with_the_demo_lengths(name, given):
    mode = condition_mode(name, num_latent_frames=5)
    references = [_latents((part.num_frames - 1) // 4 + 1, seed=7)[0] for part in reference_parts(mode, lengths=DEMO)]
    mask, reference = prepare_inference_condition(_latents(5), name, [references], lengths=DEMO)
    assert mask.shape == (1, 1, 5, 2, 3)
    assert _given_frames(mask) == given
    assert torch.equal(reference * mask, reference)
    if references:
        assert torch.equal(reference[0, :, given], torch.cat(references, dim=1))


def test_of_a_longer_reference_the_head_takes_the_beginning_and_the_tail_the_end():
    clip = _latents(12, seed=1)[0]
    _, head = prepare_inference_condition(_latents(20), "v2v_head", [[clip]])
    _, tail = prepare_inference_condition(_latents(20), "v2v_tail", [[clip]])
    assert torch.equal(head[0, :, :9], clip[:, :9])
    assert torch.equal(tail[0, :, -9:], clip[:, -9:])


@pytest.mark.parametrize("name", MODES_WITH_REFERENCE)
def test_one_latent_frame_is_t2v(name):
    assert condition_mode(name, num_latent_frames=1) is T2V
    assert condition_mode(name, num_latent_frames=2).name == name
    mask, reference = prepare_inference_condition(_latents(1), name, [[_latents(1)[0]]])
    assert not mask.any()
    assert not reference.any()


@pytest.mark.parametrize("name", MODES_WITH_REFERENCE)
@pytest.mark.parametrize("ref_list", [None, [None], [[]]], ids=["none", "none-in-batch", "empty"])
def test_a_missing_reference_is_never_ignored(name, ref_list):
    with pytest.raises(RequestError, match=f"condition.mode={name} needs a reference"):
        prepare_inference_condition(_latents(33), name, ref_list)


def test_a_clip_shorter_than_what_is_given_is_refused():
    with pytest.raises(RequestError, match="v2v_head gives 9 latent frames, and the clip has 8"):
        prepare_inference_condition(_latents(8), "v2v_head", [[_latents(9)[0]]])


def test_a_reference_that_is_too_short_is_refused():
    with pytest.raises(
        RequestError, match=r"condition\.mode=v2v_head needs 9 latent frames of its reference, which has 8"
    ):
        prepare_inference_condition(_latents(33), "v2v_head", [[_latents(8)[0]]])


def test_a_reference_of_another_size_is_refused():
    with pytest.raises(ValueError, match="does not fit latents"):
        prepare_inference_condition(_latents(3), "i2v_head", [[torch.zeros(4, 1, 1, 1)]])
    with pytest.raises(ValueError, match="references for 1 samples were given to a batch of 2"):
        prepare_inference_condition(_latents(3, batch=2), "i2v_head", [[_latents(1)[0]]])


@pytest.mark.parametrize("name", ["i2v_head", "i2v_tail", "i2v_loop"])
def test_references_come_back_in_every_sample(name):
    sampled = _latents(5, batch=3, seed=3)
    references = [[_latents(1, seed=10 + 2 * i)[0], _latents(1, seed=11 + 2 * i)[0]] for i in range(3)]
    mask, given = prepare_inference_condition(sampled, name, references)
    restored = restore_references(sampled, mask, given)
    for index in range(3):
        frames = _given_frames(mask, index)
        others = [frame for frame in range(5) if frame not in frames]
        assert frames
        assert torch.equal(restored[index, :, frames], given[index, :, frames])
        assert torch.equal(restored[index, :, others], sampled[index, :, others])
