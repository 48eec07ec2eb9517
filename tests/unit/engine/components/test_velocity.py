"""Branches of guidance: one batch for few tokens, else one after the other, with the same velocities."""

import pytest
import torch
from closeness import assert_close
from tiny_transformer import inputs, transformer
from torch import Tensor

from opensora_cli.engine.components import velocity
from opensora_cli.engine.components.velocity import (
    GuidedVelocity,
    PromptEmbeds,
    modulation_comes_first,
    modulation_values,
)
from opensora_cli.models.mmdit.blocks import modulation_layers
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.step_cache import CachedStep

ALL = tuple(Branch)
TOKENS = 12 + 5


class Watched:
    """A transformer that records its batches."""

    def __init__(self) -> None:
        self.model, self.batches = transformer(), list[int]()

    def __call__(self, packed_latents_BND: Tensor, **inputs: Tensor | None) -> Tensor:
        self.batches.append(packed_latents_BND.shape[0])
        found: Tensor = self.model(packed_latents_BND, **inputs)
        return found


def evaluated(branches: tuple[Branch, ...] = ALL) -> tuple[dict[Branch, Tensor], list[int], int]:
    """Return the velocities, the batches and the number of reported evaluations."""
    watched, reported = Watched(), list[None]()
    given = inputs(watched.model, batch=2)
    guided = GuidedVelocity(
        watched,
        PromptEmbeds(given["prompt_embeds_BLC"], given["pooled_prompt_embeds_BV"]),
        conditioning_BNK=given["conditioning_BNK"][:1],
        position_ids_1N3=given["position_ids_BN3"],
        on_evaluation=lambda: reported.append(None),
    )
    with torch.inference_mode():
        for t in (0.9, 0.4):
            found = guided(given["packed_latents_BND"][:1], t, branches)
    return found, watched.batches, len(reported)


def test_small_branches_are_one_batch_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    together, batches, reported = evaluated()
    assert batches == [3] * 2
    assert reported == 2 * 3
    single, batches, _ = evaluated((Branch.COND,))
    assert batches == [1, 1]
    assert_close(single[Branch.COND], together[Branch.COND])
    assert evaluated(()) == ({}, [], 0)
    monkeypatch.setattr(velocity, "_FEW_TOKENS", {"cpu": 3 * TOKENS - 1})
    alone, batches, reported = evaluated()
    assert batches == [1] * 6
    assert reported == 2 * 3
    assert list(together) == list(alone) == list(ALL)
    for branch in ALL:
        assert together[branch].shape == (1, 12, 16)
        assert_close(together[branch], alone[branch])
    assert not torch.allclose(alone[Branch.UNCOND], alone[Branch.UNCOND2], rtol=0.01)
    assert not torch.allclose(alone[Branch.UNCOND], alone[Branch.COND], rtol=0.01)


@pytest.mark.parametrize("few_tokens", [1024, 0])
def test_a_step_that_reuses_block_outputs_computes_no_block(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(velocity, "_FEW_TOKENS", {"cpu": few_tokens})
    model, computed, reported = transformer(), list[None](), list[None]()
    for block in (*model.double_blocks, *model.single_blocks):
        block.register_forward_pre_hook(lambda *given: computed.append(None))
    given = inputs(model, batch=2)
    guided = GuidedVelocity(
        model,
        PromptEmbeds(given["prompt_embeds_BLC"], given["pooled_prompt_embeds_BV"]),
        conditioning_BNK=given["conditioning_BNK"][:1],
        position_ids_1N3=given["position_ids_BN3"],
        on_evaluation=lambda: reported.append(None),
    )
    latents = given["packed_latents_BND"][:1]
    with torch.inference_mode():
        exact = guided(latents, 0.6, ALL)
        before = len(computed), len(reported)
        kept = guided(latents, 0.6, ALL, CachedStep(ALL, is_reused=False))
        other_phase = guided(latents, 0.6, ALL[2:], CachedStep(ALL[2:], is_reused=False))
        count = len(computed), len(reported)
        assert count[1] == before[1] + 3 + 1
        again = guided(latents, 0.6, ALL, CachedStep(ALL, is_reused=True))
        later = guided(latents + 0.1, 0.5, ALL, CachedStep(ALL, is_reused=True))
    assert (len(computed), len(reported)) == count
    for branch in ALL:
        assert torch.equal(kept[branch], exact[branch])
        assert_close(again[branch], exact[branch])
        assert not torch.allclose(later[branch], exact[branch], rtol=0.01)
    assert_close(other_phase[Branch.COND], exact[Branch.COND])


@pytest.mark.parametrize("few_tokens", [1024, 0])
def test_modulation_of_known_times_is_computed_once(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(velocity, "_FEW_TOKENS", {"cpu": few_tokens})
    model, called = transformer(), list[tuple[str, int]]()  # layers, with rows of what they are given
    for path in ("single_blocks.0.modulation.lin", "final_layer.adaLN_modulation.1", "txt_in"):
        model.get_submodule(path).register_forward_hook(
            lambda layer, given, result, path=path: called.append((path, len(result)))
        )
    given, times = inputs(model, batch=2), (0.9, 0.4, 0.0)
    embeds = PromptEmbeds(given["prompt_embeds_BLC"], given["pooled_prompt_embeds_BV"])

    def velocities(known: tuple[float, ...]) -> list[Tensor]:
        guided = GuidedVelocity(
            model,
            embeds,
            conditioning_BNK=given["conditioning_BNK"][:1],
            position_ids_1N3=given["position_ids_BN3"][:1],
            times=known,
        )
        with torch.inference_mode():
            latents = given["packed_latents_BND"][:1]
            asked = [guided(latents, times[0], ALL), guided(latents, times[1], ALL[2:]), guided(latents, times[1], ALL)]
        return [velocity_BND for found in asked for velocity_BND in found.values()]

    known = velocities(times)
    # Two prompts at three times.
    assert [rows for path, rows in called if path != "txt_in"] == [6, 6]
    assert len(called) == 2 + (2 if few_tokens else 3)
    called.clear()
    for one, other in zip(known, velocities(()), strict=True):
        assert_close(one, other)
    assert len(called) == 3 * (3 if few_tokens else 3 + 1 + 3)


def test_modulation_comes_first_if_it_is_less_than_its_weights() -> None:
    config = transformer().config
    weights = sum(transformer().get_submodule(path).weight.numel() for path in modulation_layers(config))
    rows = config.hidden_size // 2
    assert modulation_values(rows, config) == weights
    assert not modulation_comes_first(rows, config)
    assert modulation_comes_first(rows - 1, config)
    # Half a GiB in bf16.
    assert modulation_comes_first(127, MMDiTConfig())
    assert not modulation_comes_first(128, MMDiTConfig())
