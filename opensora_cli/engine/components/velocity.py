"""The transformer as the sampling loop calls it: branches of guidance in, velocities out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from opensora_cli.sampling.guidance import Branch


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """The prompt (row 0) and the negative prompt (row 1), encoded."""

    prompt_embeds_2LC: torch.Tensor
    """Of T5."""
    pooled_prompt_embeds_2V: torch.Tensor
    """Of CLIP."""


class GuidedVelocity:
    """Evaluates the transformer for one sample, branch after branch.

    One after the other and not as a batch: one clip fills a GPU, and on a CPU a batch was a tenth faster at most. So
    neither the peak of memory nor the result depends on the step.

    `conditioning_1NK` is None for a model without a condition embedding; `embedded_guidance` is for a
    guidance-distilled one. `on_evaluation` is called after each evaluation, for progress.
    """

    def __init__(
        self,
        transformer: Callable[..., torch.Tensor],
        embeds: PromptEmbeds,
        *,
        conditioning_1NK: torch.Tensor | None,
        position_ids_1N3: torch.Tensor,
        embedded_guidance: float | None = None,
        on_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self.transformer = transformer
        self.embeds = embeds
        self.conditioning_1NK = conditioning_1NK
        self.position_ids_1N3 = position_ids_1N3
        self.embedded_guidance = embedded_guidance
        self.on_evaluation = on_evaluation

    def __call__(
        self, packed_latents_1ND: torch.Tensor, t: float, branches: tuple[Branch, ...], /
    ) -> dict[Branch, torch.Tensor]:
        """Return velocity_1ND of every one of `branches` at time `t`."""
        return {branch: self._evaluate(packed_latents_1ND, t, branch) for branch in branches}

    def distilled(self, packed_latents_1ND: torch.Tensor, t: float, /) -> torch.Tensor:
        """Return velocity_1ND at time `t` of a guidance-distilled model."""
        return self._evaluate(packed_latents_1ND, t, Branch.COND)

    def _evaluate(self, packed_latents_1ND: torch.Tensor, t: float, branch: Branch) -> torch.Tensor:
        row = 0 if branch.uses_prompt else 1
        conditioning = self.conditioning_1NK
        if conditioning is not None and not branch.uses_conditioning:
            conditioning = torch.zeros_like(conditioning)
        device = packed_latents_1ND.device
        guidance = self.embedded_guidance
        velocity: torch.Tensor = self.transformer(
            packed_latents_1ND,
            position_ids_BN3=self.position_ids_1N3,
            timesteps_B=torch.tensor([t], device=device),
            prompt_embeds_BLC=self.embeds.prompt_embeds_2LC[row : row + 1],
            pooled_prompt_embeds_BV=self.embeds.pooled_prompt_embeds_2V[row : row + 1],
            conditioning_BNK=conditioning,
            embedded_guidance_B=None if guidance is None else torch.tensor([guidance], device=device),
        )
        self.on_evaluation()
        return velocity
