"""AdamW whose moments are in the host's memory, and whose updates are done there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from opensora_cli.engine.train.strategy.distribution import local
from opensora_cli.memory.host_memory import SideStream

STAGED_NUMBERS = 8 * 2**20
"""Elements of a weight that are updated at a time: enough for a copy to take much longer than its launch."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) for float32 weights on a device, with its two moments on the host.

    Weight and gradient are copied to the host in pieces of `piece` numbers, and the weight back. The next piece is
    prefetched while one is updated: two pieces of each are all that is held beside the moments. Each rank updates its
    own part of a sharded weight. The arithmetic is that of torch's fused AdamW on a CPU, and so are the other
    arguments.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, object]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        piece: int = STAGED_NUMBERS,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._piece = piece
        self._stages: dict[torch.device, _Stage] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients; a weight without one stays as it is."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def staging(self) -> list[Tensor]:
        """Return the host's memory for pieces of weights and gradients, once there was an update."""
        return [tensor for stage in self._stages.values() for tensor in stage.tensors()]

    def _update(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        part, state = local(weight), self.state[weight]
        if not state:
            state.update(fresh_state(weight))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        # In the order of memory, which is not that of the dimensions where channels come last.
        order = sorted(range(part.ndim), key=part.stride, reverse=True)
        own, *moments = (tensor.permute(order).view(-1) for tensor in (part, state["exp_avg"], state["exp_avg_sq"]))
        gradients = local(gradient).permute(order).reshape(-1)
        for start, values, slope in self._stage(part.device).passing(own, gradients):
            mean, square = (moment[start : start + values.numel()] for moment in moments)
            adamw(
                [values],
                [slope],
                [mean],
                [square],
                [],
                # The function counts the step itself, and would count it once for each piece.
                [state["step"] - 1],
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _stage(self, device: torch.device) -> "_Stage":
        if device not in self._stages:
            weights = (local(weight) for group in self.param_groups for weight in group["params"])
            largest = max(weight.numel() for weight in weights if weight.device == device)
            self._stages[device] = _Stage(device, max(1, min(self._piece, largest)))
        return self._stages[device]


def fresh_state(weight: Tensor) -> dict[str, Tensor]:
    """Return what the optimizer keeps for a weight before its first update: on the host, of this rank's part."""
    part = local(weight)
    empty = (torch.zeros_like(part, dtype=torch.float32, device="cpu") for _ in range(2))
    return {"step": torch.zeros(()), **dict(zip(("exp_avg", "exp_avg_sq"), empty, strict=True))}


@dataclass(slots=True, kw_only=True)
class _Slot:
    """Memory of the host for a piece of a weight and of its gradient."""

    values: Tensor
    slope: Tensor
    fetched: torch.cuda.Event | None = None


class _Stage:
    """Copies pieces of weights to the host and back, one ahead of the computation."""

    def __init__(self, device: torch.device, piece: int) -> None:
        self._side = SideStream(device)
        pinned = device.type == "cuda"
        self._slots = [
            _Slot(values=torch.empty(piece, pin_memory=pinned), slope=torch.empty(piece, pin_memory=pinned))
            for _ in range(2)
        ]
        self._piece = piece

    def tensors(self) -> list[Tensor]:
        """Return all that is held."""
        return [tensor for slot in self._slots for tensor in (slot.values, slot.slope)]

    def passing(self, weight: Tensor, gradient: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield pieces of (N,) tensors on the host: the start of each, its weights, to be changed in place, and its
        gradients.

        After the last one, the device's current stream waits for the weight.
        """
        ready = self._side.mark()
        starts = range(0, weight.numel(), self._piece)
        for turn, start in enumerate(starts):
            if turn == 0:
                self._fetch(weight, gradient, start, self._slots[0], after=ready)
            if turn + 1 < len(starts):
                self._fetch(weight, gradient, starts[turn + 1], self._slots[(turn + 1) % 2], after=ready)
            slot = self._slots[turn % 2]
            if slot.fetched is not None:
                slot.fetched.synchronize()
            part = weight[start : start + self._piece]
            yield start, slot.values[: part.numel()], slot.slope[: part.numel()]
            with self._side.after(None):
                part.copy_(slot.values[: part.numel()], non_blocking=True)
        with self._side.after(None):
            sent = self._side.mark()
        self._side.wait(sent)

    def _fetch(
        self, weight: Tensor, gradient: Tensor, start: int, slot: _Slot, *, after: torch.cuda.Event | None
    ) -> None:
        # On the stream of the copies back, so that a slot is read before it is refilled.
        with self._side.after(after):
            for source, target in ((weight, slot.values), (gradient, slot.slope)):
                piece = source[start : start + self._piece]
                target[: piece.numel()].copy_(piece, non_blocking=True)
            slot.fetched = self._side.mark()
