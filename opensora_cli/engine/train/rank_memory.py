"""Estimated memory of a rank of a training run, from its real steps on fake tensors."""

import torch

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.formatting import format_bytes
from opensora_cli.core.limits import read_private_memory
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.engine.components.hardware import OutOfMemoryError
from opensora_cli.engine.launch.rank import device_type
from opensora_cli.engine.train.activations import layer_values
from opensora_cli.engine.train.build import count_parameters
from opensora_cli.engine.train.estimate import (
    ACTIVATIONS,
    AVERAGE,
    FROZEN,
    OPTIMIZER,
    WEIGHTS,
    TrainingMemory,
    estimate_training,
)
from opensora_cli.engine.train.fake_ranks import BUFFERS, GRADIENTS
from opensora_cli.settings.train import TrainSettings

_KINDS = {
    "weights": WEIGHTS,
    "gradients": GRADIENTS,
    "moments": OPTIMIZER,
    "EMA": AVERAGE,
    "frozen": FROZEN,
    "activations": ACTIVATIONS,
    "buffers": BUFFERS,
}
"""Name in documents -> owner of the tensors."""
_LAYERS = 1000
"""Number of layers that surely exceeds a step; the released transformer saves the values of 300 for backward."""
_COPIES = 8
"""Number of copies of the trained weights that surely exceeds gradients, buckets, averages and moments."""


class RankMemory(Document):
    """Memory of the first rank in steps with the largest micro-batch: the peak of each kind at any time.

    No rank has a larger share of weights and tokens. `peak_bytes` is the peak of the sum, which is lower if the kinds
    have their peaks at different times.
    """

    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    """State of the optimizer."""
    ema_bytes: int
    frozen_bytes: int
    """Frozen encoders."""
    activations_bytes: int
    """Activations saved for backward, and temporary results."""
    buffers_bytes: int
    """Gathered weights, gradients that are being reduced, and host buffers of offloaded activations."""
    peak_bytes: int
    """Peak on a CPU, where offloaded memory also counts."""
    device_peak_bytes: int
    """Peak on a GPU, without offloaded weights, averages, moments and activations."""
    mapped_bytes: int
    """Frozen weights, which a CPU maps from their files; a part of `peak_bytes`."""

    @classmethod
    def of(cls, memory: TrainingMemory, settings: TrainSettings) -> "RankMemory":
        """Return the document of an estimate or a measurement."""
        return cls(
            **{f"{kind.lower()}_bytes": memory.most[owner] for kind, owner in _KINDS.items()},
            peak_bytes=memory.peak_bytes,
            device_peak_bytes=memory.device_peak_bytes,
            mapped_bytes=_mapped_bytes(memory, settings),
        )

    def lines(self) -> list[str]:
        """Return a table in MiB."""
        sizes = {kind: getattr(self, f"{kind.lower()}_bytes") for kind in (*_KINDS, "peak")}
        if self.device_peak_bytes != self.peak_bytes:
            sizes["on a GPU"] = self.device_peak_bytes
        return [
            f"{'memory':12}{'MiB a rank':>13}",
            *(f"{title:12}{size / 2**20:>13,.1f}" for title, size in sizes.items()),
        ]


def _mapped_bytes(memory: TrainingMemory, settings: TrainSettings) -> int:
    """Return the bytes of frozen weights, which a CPU may map from their files."""
    return memory.at_peak[FROZEN] + (memory.at_peak[WEIGHTS] if settings.lora.is_on else 0)


def estimate_rank(settings: TrainSettings, *, reporter: Reporter | None = None) -> RankMemory:
    """Return the memory of the first rank.

    Raises RequestError if sizes contradict each other, HardwareError if torch is too old, and RuntimeError in a process
    that is a rank itself.
    """
    with (reporter or SilentReporter()).stage("estimate memory"):
        return RankMemory.of(estimate_training(settings), settings)


def refuse_lack_of_memory(settings: TrainSettings, *, rank: int, reporter: Reporter) -> None:
    """Raise OutOfMemoryError if this machine lacks the memory for a run on a CPU.

    The kernel kills a process that exceeds the memory without a message; on a GPU, a failed allocation is an error.
    Call this before a rank joins the others. Nothing is estimated if memory is plentiful. Raises RequestError if sizes
    contradict each other.
    """
    if device_type(settings.device_name) != "cpu":
        return
    free = read_private_memory().free_bytes // settings.parallel.ranks_per_node
    trained = count_parameters(settings)
    if free >= 4 * (_LAYERS * layer_values(settings) + _COPIES * trained):
        return
    try:
        with reporter.stage("estimate memory"), torch.random.fork_rng(devices=[]):
            memory = estimate_training(settings, rank=rank)
    except HardwareError as error:
        reporter.warn(error.message)
        return
    if (needed := memory.peak_bytes - _mapped_bytes(memory, settings)) > free:
        raise OutOfMemoryError(
            f"a step needs {format_bytes(needed)} of memory on each rank, and {format_bytes(free)} are free",
            hint="take smaller batches (data.buckets), or memory.checkpointing=full; --dry-run "
            "prints the memory of a rank",
        )
