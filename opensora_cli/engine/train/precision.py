"""The precision of a training step, and the loss scale that float16 needs."""

import torch
from torch import Tensor, nn

from opensora_cli.settings.train_loop import Compute, PrecisionSettings

DTYPES = {Compute.FP32: torch.float32, Compute.BF16: torch.bfloat16, Compute.FP16: torch.float16}
_LOWEST_SCALE = 1.0


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether bfloat16 products are faster there than float32; on a CPU without them they are far slower."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Precision:
    """The precision of a run. What is trained, its gradients and moments are in float32; layers compute as chosen.

    Gradients of float16 underflow, so there the loss is scaled up, and its gradients down again (Micikevicius et al.
    2018). The scale halves with an update that is skipped, and doubles after a number of good ones.
    """

    def __init__(self, settings: PrecisionSettings, device: torch.device) -> None:
        self.dtype = DTYPES[settings.compute]
        self._device = device
        self._scales = settings.compute is Compute.FP16
        self._window = settings.loss_scale_window
        self._scale = settings.initial_loss_scale
        self._good_updates = 0

    @property
    def may_overflow(self) -> bool:
        """Whether a gradient that is not finite may be due to the scale alone, which a lower one fixes."""
        return self._scales and self._scale > _LOWEST_SCALE

    def autocast(self) -> torch.autocast:
        """Return the context in which layers compute in `dtype`."""
        return torch.autocast(self._device.type, dtype=self.dtype, enabled=self.dtype is not torch.float32)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss * self._scale if self._scales else loss

    @torch.no_grad()
    def unscale(self, module: nn.Module) -> None:
        """Divide the gradients of a module by the scale, after the last backward pass of an update."""
        if self._scales:
            # Each by itself: sharded and whole ones do not mix in one call.
            for weight in module.parameters():
                if weight.grad is not None:
                    weight.grad.mul_(1 / self._scale)

    def update(self, *, skipped: bool) -> None:
        """Adapt the scale after an update, `skipped` on all ranks if a gradient was not finite on any."""
        if skipped:
            self._scale = max(self._scale / 2, _LOWEST_SCALE)
        self._good_updates = 0 if skipped else self._good_updates + 1
        if self._good_updates >= self._window:
            self._scale *= 2
            self._good_updates = 0

    def figures(self) -> dict[str, float]:
        """Return the figures for the log."""
        return {"loss_scale": self._scale} if self._scales else {}

    def state_dict(self) -> dict[str, float]:
        """Return the state for a resumed run; plain numbers, the same on all ranks."""
        return {"loss_scale": self._scale, "good_updates": self._good_updates} if self._scales else {}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Continue from there; from the state of a run without a scale, with the initial one."""
        if self._scales and state_dict:
            self._scale = state_dict["loss_scale"]
            self._good_updates = int(state_dict["good_updates"])
