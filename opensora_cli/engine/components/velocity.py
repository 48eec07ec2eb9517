"""The transformer as the sampling loop calls it: branches of guidance in, velocities out."""

from collections.abc import Callable, Sequence
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
    """Evaluates the transformer for a batch of samples, each with `embeds` of its own, branch after branch.

    Branches one after the other and not as a batch: one clip fills a GPU, and on a CPU a batch of them was a tenth
    faster at most. So neither the peak of memory nor the result depends on the step.

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

    def __call__(
        self, packed_latents_BND: torch.Tensor, t: float, branches: tuple[Branch, ...], /
    ) -> dict[Branch, torch.Tensor]:
        """Return velocity_BND of every one of `branches` at time `t`."""
        return {branch: self._evaluate(packed_latents_BND, t, branch) for branch in branches}

    def _evaluate(self, packed_latents_BND: torch.Tensor, t: float, branch: Branch) -> torch.Tensor:
        row = 0 if branch.uses_prompt else 1
        conditioning = self.conditioning_BNK
        if conditioning is not None and not branch.uses_conditioning:
            conditioning = torch.zeros_like(conditioning)
        device, batch = packed_latents_BND.device, len(self.embeds)
        # `torch.full`: a GPU would be waited for to copy what `torch.tensor` makes on the host.
        guidance = self.embedded_guidance
        velocity: torch.Tensor = self.transformer(
            packed_latents_BND,
            position_ids_BN3=self.position_ids_1N3,
            timesteps_B=torch.full((batch,), t, device=device),
            prompt_embeds_BLC=_together([each.prompt_embeds_2LC[row : row + 1] for each in self.embeds]),
            pooled_prompt_embeds_BV=_together([each.pooled_prompt_embeds_2V[row : row + 1] for each in self.embeds]),
            conditioning_BNK=conditioning,
            embedded_guidance_B=None if guidance is None else torch.full((batch,), guidance, device=device),
        )
        self.on_evaluation()
        return velocity


def _together(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return (B, ...) of B times (1, ...), without a copy where there is one."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
