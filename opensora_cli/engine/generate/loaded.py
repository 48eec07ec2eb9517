"""Components while they are in use: loaded in sight of the user, and on the device as far as the plan says."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from opensora_cli.checkpoint.opening import open_checkpoint
from opensora_cli.core.exceptions import HardwareError
from opensora_cli.core.progress import BYTES
from opensora_cli.engine.components.hardware import OutOfMemoryError, release_memory
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate import load as build
from opensora_cli.engine.generate.plan import ExecutionPlan
from opensora_cli.engine.generate.ranks import SharedDecoder
from opensora_cli.engine.generate.record import RunRecord
from opensora_cli.models.mmdit import MMDiT
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.enums import HostWeights, OffloadMode


@contextmanager
def loaded_transformer(
    plan: ExecutionPlan,
    record: RunRecord,
    *,
    group: dist.ProcessGroup | None = None,
    neighbours: dist.ProcessGroup | None = None,
) -> Iterator[MMDiT]:
    """Yield the transformer, ready to run, with as much of it on the device as the plan says.

    Its loading is shown as part of the stage `load`.

    Args:
        plan: what goes where.
        record: told of stages.
        group: ranks that share each block's heads and features.
        neighbours: the ranks of this machine.
    """
    with ExitStack() as stack:
        with _loading(plan.weights.path(Component.TRANSFORMER), record) as advance:
            transformer = build.load_transformer(plan, group=group, neighbours=neighbours, advance=advance)
        if plan.offload.mode is OffloadMode.BLOCKS:
            with record.stage("offload"):
                _stream(plan, transformer, stack, record)
        yield transformer


def _stream(plan: ExecutionPlan, transformer: MMDiT, stack: ExitStack, record: RunRecord) -> None:
    try:
        stack.enter_context(build.streamed_blocks(plan, transformer))
    except HardwareError as error:
        if plan.settings.memory.host_weights is not None or isinstance(error, OutOfMemoryError):
            raise
        record.reporter.warn(f"{error.message}: the blocks wait where they are mapped")
        stack.enter_context(build.streamed_blocks(plan, transformer, source=HostWeights.MAPPED))


class KeptVAE:
    """The autoencoder: loaded when it is first needed, and kept for the next time, on the device or beside it.

    Args:
        plan: where it goes.
        record: its loading is shown as part of the stage `load`.
    """

    def __init__(self, plan: ExecutionPlan, record: RunRecord) -> None:
        self._plan = plan
        self._record = record
        self._vae: HunyuanVAE | None = None

    def on_device(self) -> HunyuanVAE:
        """Return it, on the device; it stays there until it is put away.

        Raises:
            CheckpointError: its weights are missing or broken, or do not fit the settings.
            OutOfMemoryError: there is no room for it.
        """
        if self._vae is None:
            with _loading(self._plan.weights.path(Component.VAE), self._record) as advance:
                self._vae = build.load_vae(self._plan, advance=advance)
        elif next(self._vae.parameters()).device != self._plan.hardware.device:
            with self._record.stage("load"):
                self._vae.to(self._plan.hardware.device)
        return self._vae

    def share_tiles(self) -> SharedDecoder:
        """Let the ranks decode in turn from now on; returns what does that in the place of the decoder.

        Raises:
            CheckpointError, OutOfMemoryError: as `on_device`.
        """
        vae = self.on_device()
        decoder = SharedDecoder(vae)
        vae.decoder = cast(Any, decoder)
        return decoder

    def put_away(self) -> None:
        """Make room on the device: if it is there, it waits in the host's memory."""
        if self._vae is not None:
            self._vae.to("cpu")
            release_memory(self._plan.hardware.device)


@contextmanager
def _loading(path: Path, record: RunRecord) -> Iterator[build.Advance]:
    """Show the loading of weights; yields what is to be told of bytes."""
    total = sum(entry.nbytes for entry in open_checkpoint(path).entries.values())
    with record.stage("load", total=total, unit=BYTES) as progress:
        yield progress.advance
