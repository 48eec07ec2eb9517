"""Plain training loop for one device, the baseline of the trainer's measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opensora_cli.core.dtypes import torch_dtype
from opensora_cli.data.batches import ClipBatch
from opensora_cli.engine.encode.clips import LATENTS, POOLED_PROMPT_EMBEDS, PROMPT_EMBEDS, CachedClip
from opensora_cli.engine.encode.encoders import EmptyPrompt
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids
from opensora_cli.sampling.schedule import flow_shift_for
from opensora_cli.settings.train import TrainSettings


@dataclass(frozen=True)
class _Tensors:
    """Micro-batch of a plain loop: stacked tensors on the host."""

    latents_BCTHW: Tensor
    prompt_embeds_BLC: Tensor
    pooled_prompt_embeds_BV: Tensor

    @classmethod
    def of(cls, batch: ClipBatch) -> "_Tensors":
        clips: tuple[CachedClip, ...] = batch.cached or ()
        return cls(
            torch.stack([clip[LATENTS] for clip in clips]),
            torch.stack([clip[PROMPT_EMBEDS] for clip in clips]),
            torch.stack([clip[POOLED_PROMPT_EMBEDS] for clip in clips]),
        )


class PlainLoop:
    """Plain loop: everything is in `step`, and nothing is checked or logged.

    Args:
        model: the model, trained in place.
        batches: micro-batches, used in a cycle.
        empty: embeddings that replace those of dropped captions.
        settings: the settings of the trainer.
        device: the device of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[ClipBatch],
        *,
        empty: EmptyPrompt,
        settings: TrainSettings,
        device: torch.device,
    ) -> None:
        chosen = settings.optimizer
        self._model = model
        self._weights: list[Tensor] = list(model.parameters())
        self.averages = [weight.detach().clone() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(
            self._weights,
            lr=chosen.learning_rate,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            fused=True,
        )
        self._batches = [_Tensors.of(batch) for batch in batches]
        self._empty_LC = empty.prompt_embeds_LC.to(device).float()
        self._empty_V = empty.pooled_prompt_embeds_V.to(device).float()
        self._settings = settings
        self._dtype = torch_dtype(settings.precision.compute)
        self._device = device
        self._steps = 0
        torch.manual_seed(0)

    def step(self) -> float:
        """Do one step and return its loss."""
        batch, device, patch = self._batches[self._steps % len(self._batches)], self._device, 4
        latents = batch.latents_BCTHW.to(device).float()
        count, _, frames, height, width = latents.shape
        prompt = batch.prompt_embeds_BLC.to(device).float()
        prompt = torch.where(self._drop(count)[:, None, None], self._empty_LC, prompt)
        pooled = torch.where(
            self._drop(count)[:, None], self._empty_V, batch.pooled_prompt_embeds_BV.to(device).float()
        )
        data, noise = pack_latents(latents, patch), pack_latents(torch.randn_like(latents), patch)
        shift = flow_shift_for(tokens_per_frame=height * width // 4, num_latent_frames=frames)
        share = torch.sigmoid(torch.randn(count, device=device))
        times = shift * share / (1 + (shift - 1) * share)
        noisy = torch.lerp(data, noise, times[:, None, None])
        nothing_given = pack_conditioning(torch.zeros_like(latents[:, :1]), torch.zeros_like(latents), patch)
        with torch.autocast(device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            velocity = self._model(
                noisy,
                position_ids_BN3=position_ids(count, frames, height // patch, width // patch, device=device),
                timesteps_B=times,
                prompt_embeds_BLC=prompt,
                pooled_prompt_embeds_BV=pooled,
                conditioning_BNK=nothing_given,
            )
            loss = nn.functional.mse_loss(velocity.float(), noise - data)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._weights, self._settings.optimizer.max_grad_norm)
        self._optimizer.step()
        decay = self._settings.loop.ema_decay
        assert decay is not None
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self._weights, 1 - decay)
        self._steps += 1
        return loss.item()

    def _drop(self, count: int) -> Tensor:
        return torch.rand(count, device=self._device) < self._settings.train_mmdit.t5_dropout
