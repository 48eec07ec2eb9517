"""The transformer as the sampling loop calls it: branches of guidance in, velocities out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from opensora_cli.models.mmdit import MMDiT, MMDiTConfig
from opensora_cli.models.mmdit.layers import modulation_width
from opensora_cli.models.mmdit.model import BlockResidual
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.step_cache import CachedStep, Phase

_FEW_TOKENS = {"cpu": 1024}
_FEW_TOKENS_ELSEWHERE = 8192
"""That a device is not yet busy with, so that three branches in one batch take less time than one after the other."""
_MODULATION_VALUES = 2**22
"""That are computed before the first step at most: three times those of the demo in 50 steps."""


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
    evaluation, for progress. Of `times` that are known before, modulation is computed once for all where
    that is `known_modulation_values`.
    """

    def __init__(
        self,
        transformer: Callable[..., torch.Tensor],
        embeds: Sequence[PromptEmbeds],
        *,
        conditioning_BNK: torch.Tensor | None,
        position_ids_1N3: torch.Tensor,
        embedded_guidance: float | None = None,
        times: Sequence[float] = (),
        on_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self.transformer = transformer
        self.embeds = embeds
        self.conditioning_BNK = conditioning_BNK
        self.position_ids_1N3 = position_ids_1N3
        self.embedded_guidance = embedded_guidance
        self.times = tuple(dict.fromkeys(times))
        self.on_evaluation = on_evaluation
        self._modulation: Mapping[nn.Module, torch.Tensor] = {}
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
        modulation = self._known_modulation(t, branches, device)
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
            **modulation,
            **kept,
        )
        if cached is None or not cached.is_reused:
            for _ in branches:
                self.on_evaluation()
        return (velocity,) if count == 1 else velocity.chunk(count)

    def _known_modulation(
        self, t: float, branches: tuple[Branch, ...], device: torch.device
    ) -> dict[str, Mapping[nn.Module, torch.Tensor]]:
        """Return the `modulation` of an evaluation; nothing where it is computed there."""
        if t not in self.times or not isinstance(self.transformer, MMDiT):
            return {}
        if not known_modulation_values(len(self.times), self.transformer.config, device):
            return {}
        # Of all samples with the prompt, then of all with the negative one, where there is one, for each time.
        samples, prompts = len(self.embeds), len(self.embeds[0].pooled_prompt_embeds_2V)
        if not self._modulation:
            pooled_RV = torch.cat(
                [each.pooled_prompt_embeds_2V[row : row + 1] for row in range(prompts) for each in self.embeds]
            ).repeat(len(self.times), 1)
            guidance = self.embedded_guidance
            self._modulation = self.transformer.modulation_of(
                torch.tensor(self.times, device=device).repeat_interleave(prompts * samples),
                pooled_RV,
                None if guidance is None else pooled_RV.new_full((len(pooled_RV),), guidance, dtype=torch.float32),
            )
        first = prompts * samples * self.times.index(t)
        spans = [first + (0 if branch.uses_prompt else samples) for branch in branches]
        return {
            "modulation": {
                layer: _together([values_RD[start : start + samples] for start in spans])
                for layer, values_RD in self._modulation.items()
            }
        }

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


def known_modulation_values(num_times: int, config: MMDiTConfig, device: torch.device) -> int:
    """Return how many values of modulation are computed before a clip's first step, for all times and both prompts.

    A CPU reads all of its weights for a few rows; elsewhere that hardly takes time. 0 for large models, of which they
    would be large.
    """
    values = 2 * num_times * modulation_width(config)
    return values if device.type == "cpu" and values <= _MODULATION_VALUES else 0


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return (B, ...) of several, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
