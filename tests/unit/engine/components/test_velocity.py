"""Branches of guidance: one batch where they are small, one after the other where they are not, the same velocities."""

import pytest
import torch
from closeness import assert_close
from tiny_transformer import inputs, transformer
from torch import Tensor

from opensora_cli.engine.components import velocity
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds, are_batched
from opensora_cli.sampling.guidance import Branch

ALL = tuple(Branch)
TOKENS = 12 + 5


class Watched:
    """A transformer that notes the batches it is called with."""

    def __init__(self) -> None:
        self.model, self.batches = transformer(), list[int]()

    def __call__(self, packed_latents_BND: Tensor, **inputs: Tensor | None) -> Tensor:
        self.batches.append(packed_latents_BND.shape[0])
        found: Tensor = self.model(packed_latents_BND, **inputs)
        return found


def evaluated(samples: int, branches: tuple[Branch, ...] = ALL) -> tuple[dict[Branch, Tensor], list[int], int]:
    """Return the velocities, the batches, and the number of evaluations that were reported."""
    watched, reported = Watched(), list[None]()
    given = inputs(watched.model, batch=2 * samples)
    conditioning = given["conditioning_BNK"][:samples]
    embeds = [
        PromptEmbeds(given["prompt_embeds_BLC"][2 * index : 2 * index + 2], given["pooled_prompt_embeds_BV"][-2:])
        for index in range(samples)
    ]
    guided = GuidedVelocity(
        watched,
        embeds,
        conditioning_BNK=conditioning,
        position_ids_1N3=given["position_ids_BN3"],
        on_evaluation=lambda: reported.append(None),
    )
    with torch.inference_mode():
        for t in (0.9, 0.4):
            found = guided(given["packed_latents_BND"][:samples], t, branches)
    return found, watched.batches, len(reported)


@pytest.mark.parametrize("samples", [1, 2])
def test_small_branches_are_one_batch_and_the_same(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together, batches, reported = evaluated(samples)
    assert batches == [3 * samples] * 2
    assert reported == 2 * 3
    monkeypatch.setattr(velocity, "_FEW_TOKENS", {"cpu": 3 * samples * TOKENS - 1})
    alone, batches, reported = evaluated(samples)
    assert batches == [samples] * 6
    assert reported == 2 * 3
    assert list(together) == list(alone) == list(ALL)
    for branch in ALL:
        assert together[branch].shape == (samples, 12, 16)
        assert_close(together[branch], alone[branch])
    assert not torch.allclose(alone[Branch.UNCOND], alone[Branch.UNCOND2], rtol=0.01)
    assert not torch.allclose(alone[Branch.UNCOND], alone[Branch.COND], rtol=0.01)


def test_a_branch_does_not_depend_on_those_beside_it_where_it_is_alone() -> None:
    alone, batches, _ = evaluated(1, (Branch.COND,))
    assert batches == [1, 1]
    assert_close(alone[Branch.COND], evaluated(1)[0][Branch.COND])


def test_a_rank_without_a_branch_evaluates_nothing() -> None:
    assert evaluated(1, ()) == ({}, [], 0)


def test_size_and_device_decide() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert are_batched(3 * 112, cpu)  # the demo's
    assert not are_batched(2 * 8832, cpu)  # of 256px and 129 frames
    assert not are_batched(2 * 8832, cuda)
