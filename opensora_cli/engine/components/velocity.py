"""The transformer as the sampling loop calls it: branches of guidance in, velocities out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from opensora_cli.models.mmdit.model import BlockResidual
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.step_cache import CachedStep, Phase

_FEW_TOKENS = {"cpu": 1024}
_FEW_TOKENS_ELSEWHERE = 8192
"""That a device is not yet busy with, so that three branches in one batch take less time than one after the other."""


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """The prompt (row 0) and the negative prompt (row 1), encoded."""

    prompt_embeds_2LC: torch.Tensor
    """Of T5."""
    pooled_prompt_embeds_2V: torch.Tensor
    """Of CLIP."""


class _Inputs(NamedTuple):
    """What the transformer is given for some branches at every step."""

    prompt_embeds_BLC: torch.Tensor
    pooled_prompt_embeds_BV: torch.Tensor
    conditioning_BNK: torch.Tensor | None


class GuidedVelocity:
    """Evaluates the transformer for a batch of samples, each with `embeds` of its own.

    Branches are one batch where `are_batched`, and else computed one after the other: then neither the peak of memory
    nor the result depends on the step.

    `conditioning_BNK` is None for a model without a condition embedding; `embedded_guidance` is for a
    guidance-distilled one. `position_ids_1N3` are the same for all samples. `on_evaluation` is called after each
    evaluation, for progress.
    """

    def __init__(
        self,
        transformer: Callable[..., torch.Tensor],
        embeds: Sequence[PromptEmbeds],
        *,
        conditioning_BNK: torch.Tensor | None,
        position_ids_1N3: torch.Tensor,
        embedded_guidance: float | None = None,
        on_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self.transformer = transformer
        self.embeds = embeds
        self.conditioning_BNK = conditioning_BNK
        self.position_ids_1N3 = position_ids_1N3
        self.embedded_guidance = embedded_guidance
        self.on_evaluation = on_evaluation
        self._inputs: dict[tuple[Branch, ...], _Inputs] = {}
        self._residuals: dict[tuple[Phase, tuple[Branch, ...]], BlockResidual] = {}

    def __call__(
        self,
        packed_latents_BND: torch.Tensor,
        t: float,
        branches: tuple[Branch, ...],
        /,
        cached: CachedStep | None = None,
    ) -> dict[Branch, torch.Tensor]:
        """Return velocity_BND of every one of `branches` at time `t`; see `VelocityFn`."""
        if not branches:
            return {}
        text_tokens = self.embeds[0].prompt_embeds_2LC.shape[1]
        tokens = packed_latents_BND.shape[0] * (packed_latents_BND.shape[1] + text_tokens)
        groups = [branches] if are_batched(tokens, packed_latents_BND.device) else [(each,) for each in branches]
        velocities: dict[Branch, torch.Tensor] = {}
        for group in groups:
            velocities |= zip(group, self._evaluate(packed_latents_BND, t, group, cached), strict=True)
        return velocities

    def _evaluate(
        self, packed_latents_BND: torch.Tensor, t: float, branches: tuple[Branch, ...], cached: CachedStep | None
    ) -> tuple[torch.Tensor, ...]:
        if branches not in self._inputs:
            self._inputs[branches] = self._inputs_of(branches)
        prompt_embeds_BLC, pooled_BV, conditioning_BNK = self._inputs[branches]
        device, count = packed_latents_BND.device, len(branches)
        batch = count * packed_latents_BND.shape[0]
        # `torch.full`: a GPU would be waited for to copy what `torch.tensor` makes on the host.
        guidance = self.embedded_guidance
        kept: dict[str, BlockResidual] = {}
        if cached is not None:
            kept["residual"] = self._residuals.setdefault((cached.phase, branches), BlockResidual())
            kept["residual"].is_reused = cached.is_reused
        velocity: torch.Tensor = self.transformer(
            _together([packed_latents_BND] * count),
            position_ids_BN3=self.position_ids_1N3,
            timesteps_B=torch.full((batch,), t, device=device),
            prompt_embeds_BLC=prompt_embeds_BLC,
            pooled_prompt_embeds_BV=pooled_BV,
            conditioning_BNK=conditioning_BNK,
            embedded_guidance_B=None if guidance is None else torch.full((batch,), guidance, device=device),
            **kept,
        )
        if cached is None or not cached.is_reused:
            for _ in branches:
                self.on_evaluation()
        return (velocity,) if count == 1 else velocity.chunk(count)

    def _inputs_of(self, branches: tuple[Branch, ...]) -> _Inputs:
        rows = [(each, 0 if branch.uses_prompt else 1) for branch in branches for each in self.embeds]
        given = self.conditioning_BNK
        return _Inputs(
            _together([each.prompt_embeds_2LC[row : row + 1] for each, row in rows]),
            _together([each.pooled_prompt_embeds_2V[row : row + 1] for each, row in rows]),
            None
            if given is None
            else _together([given if branch.uses_conditioning else torch.zeros_like(given) for branch in branches]),
        )


def are_batched(tokens: int, device: torch.device) -> bool:
    """Return whether branches of so many tokens each, text and all samples included, are one batch on a device.

    Decided by size alone, however many branches a step has: a run that goes on does the same, since results differ by
    rounding, and no step takes more memory than one with all of them.
    """
    return len(Branch) * tokens <= _FEW_TOKENS.get(device.type, _FEW_TOKENS_ELSEWHERE)


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return (B, ...) of several, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
