"""Transformer for the sampling loop: branches of guidance in, velocities out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.layers import Rotary, modulation_width
from opensora_cli.models.mmdit.model import BlockResidual, KnownInputs, MMDiT
from opensora_cli.sampling.guidance import Branch
from opensora_cli.sampling.step_cache import CachedStep, Phase

_PROMPTS = 2
_MODULATION_VALUES = 2**28
"""Limit of the values that are computed before the first step: 512 MiB in bf16, 127 times of the released model."""
_FEW_TOKENS = {"cpu": 1024}
_FEW_TOKENS_ELSEWHERE = 8192
"""Tokens that do not fill a device, so that three branches in one batch take less time than one after the other."""


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Embeddings of the prompt (row 0) and the negative prompt (row 1)."""

    prompt_embeds_2LC: torch.Tensor
    """Output of T5."""
    pooled_prompt_embeds_2V: torch.Tensor
    """Output of CLIP."""


class GuidedVelocity:
    """Evaluates the transformer for one sample, its branches as one batch if `are_batched`, else one after the other.

    `conditioning_BNK` is None for a model without a condition embedding; `embedded_guidance` is for a
    guidance-distilled one. `on_evaluation` is called after each evaluation, for progress. With `times` the transformer
    is an `MMDiT`, perhaps shared by ranks, and is evaluated only at these times; everything that depends only on times,
    prompts and positions is computed once.
    """

    def __init__(
        self,
        transformer: Callable[..., torch.Tensor],
        embeds: PromptEmbeds,
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
        # Ranks that share tokens wrap the transformer.
        model = transformer if isinstance(transformer, MMDiT) else getattr(transformer, "model", None)
        self._model = model if times and isinstance(model, MMDiT) else None
        self._modulation: Mapping[nn.Module, torch.Tensor] = {}
        self._text: dict[tuple[Branch, ...], torch.Tensor] = {}
        self._rotary: Rotary | None = None
        self._inputs: dict[tuple[Branch, ...], dict[str, torch.Tensor | None]] = {}
        self._residuals: dict[tuple[Phase, tuple[Branch, ...]], BlockResidual] = {}

    def __call__(
        self,
        packed_latents_BND: torch.Tensor,
        t: float,
        branches: tuple[Branch, ...],
        /,
        cached: CachedStep | None = None,
    ) -> dict[Branch, torch.Tensor]:
        """Return velocity_BND of each of `branches` at time `t`; see `VelocityFn`."""
        if not branches:
            return {}
        tokens = packed_latents_BND.shape[1] + self.embeds.prompt_embeds_2LC.shape[1]
        groups = [branches] if are_batched(tokens, packed_latents_BND.device) else [(each,) for each in branches]
        velocities: dict[Branch, torch.Tensor] = {}
        for group in groups:
            if group not in self._inputs:
                self._inputs[group] = self._inputs_of(group)
            device, count = packed_latents_BND.device, len(group)
            guidance = self.embedded_guidance
            kept: dict[str, BlockResidual | KnownInputs] = {}
            if self._model is not None:
                kept["known"] = self._known_inputs(self._model, t, group)
            if cached is not None:
                residual = self._residuals.setdefault((cached.phase, group), BlockResidual())
                residual.is_reused = cached.is_reused
                kept["residual"] = residual
            velocity: torch.Tensor = self.transformer(
                _together([packed_latents_BND] * count),
                position_ids_BN3=self.position_ids_1N3,
                # `torch.tensor` would copy from the host, and wait for the GPU.
                timesteps_B=torch.full((count,), t, device=device),
                embedded_guidance_B=None if guidance is None else torch.full((count,), guidance, device=device),
                **self._inputs[group],
                **kept,
            )
            if cached is None or not cached.is_reused:
                for _ in group:
                    self.on_evaluation()
            velocities |= zip(group, velocity.chunk(count), strict=True)
        return velocities

    def _known_inputs(self, model: MMDiT, t: float, branches: tuple[Branch, ...]) -> KnownInputs:
        prompts = len(self.embeds.pooled_prompt_embeds_2V)
        if not self._modulation:
            # The rows of the prompt and of the negative prompt, for each time.
            pooled_RV = self.embeds.pooled_prompt_embeds_2V.repeat(len(self.times), 1)
            guidance = self.embedded_guidance
            self._modulation = model.modulation_of(
                torch.cat([torch.full((prompts,), time, device=pooled_RV.device) for time in self.times]),
                pooled_RV,
                None if guidance is None else pooled_RV.new_full((len(pooled_RV),), guidance, dtype=torch.float32),
            )
        first = prompts * self.times.index(t)
        rows = [first + (0 if branch.uses_prompt else 1) for branch in branches]
        modulation = {
            layer: _together([values_RD[row : row + 1] for row in rows])
            for layer, values_RD in self._modulation.items()
        }
        if model is not self.transformer:
            # Ranks share the tokens, and each embeds its part.
            return KnownInputs(modulation)
        if branches not in self._text:
            prompt_embeds_BLC = self._inputs[branches]["prompt_embeds_BLC"]
            assert prompt_embeds_BLC is not None
            self._text[branches] = model.text_tokens(prompt_embeds_BLC)
        text_BLD = self._text[branches]
        if self._rotary is None:
            self._rotary = model.rotary_table(self.position_ids_1N3, text_length=text_BLD.shape[1])
        return KnownInputs(modulation, text_BLD, self._rotary)

    def _inputs_of(self, branches: tuple[Branch, ...]) -> dict[str, torch.Tensor | None]:
        """Return the inputs of the transformer that are equal at every step."""
        rows = [0 if branch.uses_prompt else 1 for branch in branches]
        embeds, given = self.embeds, self.conditioning_BNK
        inputs: dict[str, torch.Tensor | None] = {
            "prompt_embeds_BLC": _together([embeds.prompt_embeds_2LC[row : row + 1] for row in rows]),
            "pooled_prompt_embeds_BV": _together([embeds.pooled_prompt_embeds_2V[row : row + 1] for row in rows]),
            "conditioning_BNK": None,
        }
        if given is not None:
            parts = [given if branch.uses_conditioning else torch.zeros_like(given) for branch in branches]
            inputs["conditioning_BNK"] = _together(parts)
        return inputs


def are_batched(tokens: int, device: torch.device) -> bool:
    """Return whether branches of `tokens` tokens each are one batch, at all steps: a resumed run rounds alike."""
    return len(Branch) * tokens <= _FEW_TOKENS.get(device.type, _FEW_TOKENS_ELSEWHERE)


def modulation_values(num_times: int, config: MMDiTConfig) -> int:
    """Return the number of values that modulate the tokens of one sample at `num_times` times, with both prompts."""
    return _PROMPTS * num_times * modulation_width(config)


def modulation_comes_first(num_times: int, config: MMDiTConfig) -> bool:
    """Return whether the modulation of all times is computed first: if it is small, and less than its weights."""
    return _PROMPTS * num_times < config.hidden_size and modulation_values(num_times, config) <= _MODULATION_VALUES


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return tensors (1, ...) as one (B, ...), without copying a single tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
