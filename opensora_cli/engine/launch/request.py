"""How many ranks to start and where, and whether this machine can."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.ranks import read_endpoint
from opensora_cli.settings.parallel import DeviceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The ranks to start on this machine, and its place among several.

    Args:
        gpus: number of ranks here, one for each card.
        device_type: of the ranks.
        log_dir: folder for one log file per rank, `rank0.log` and so on; made where it is missing.
        nnodes: number of machines.
        node_rank: which of them this one is, 0 to nnodes - 1.
        rdzv_endpoint: `host:port` of machine 0, where all meet; None: only this machine.
        devices: cards to use, as this process counts those it sees; None: the first `gpus`.
    """

    gpus: int
    device_type: Literal["cpu", "cuda"]
    log_dir: Path
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    devices: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, parallel: DeviceSettings, *, gpus: int, device_type: Literal["cpu", "cuda"], log_dir: Path
    ) -> "LaunchRequest":
        """Return the request for `gpus` ranks on this machine, with its place among several as settings say it."""
        return cls(
            gpus=gpus,
            device_type=device_type,
            log_dir=log_dir,
            nnodes=parallel.nnodes,
            node_rank=parallel.node_rank,
            rdzv_endpoint=parallel.rdzv_endpoint,
            devices=parallel.devices,
        )

    def check(self) -> None:
        """Check the request against itself and against this machine.

        Raises:
            RequestError: it contradicts itself.
            HardwareError: there are fewer cards here.
        """
        if self.gpus < 1:
            raise RequestError(f"gpus={self.gpus} must be at least 1")
        if self.nnodes < 1:
            raise RequestError(f"nnodes={self.nnodes} must be at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise RequestError(f"node_rank={self.node_rank} must be 0 to {self.nnodes - 1}, since nnodes={self.nnodes}")
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise RequestError(
                f"nnodes={self.nnodes} needs rdzv_endpoint: where the machines meet",
                hint="name the first machine and a free port of it on all of them: --rdzv-endpoint node0:29500",
            )
        if self.rdzv_endpoint is not None:
            self.endpoint()
        self._check_devices()
        if sys.platform == "win32":
            raise HardwareError("several ranks can be started on Linux and macOS only")

    def endpoint(self) -> tuple[str, int]:
        """Return host and port where several machines meet.

        Raises:
            RequestError: `rdzv_endpoint` is not `host:port`.
        """
        endpoint = read_endpoint(self.rdzv_endpoint or "")
        if endpoint is None:
            raise RequestError(
                f"rdzv_endpoint={self.rdzv_endpoint!r} must be host:port, with a port from 1 to 65535",
                hint="for example --rdzv-endpoint node0:29500",
            )
        return endpoint

    def visible_devices(self) -> str | None:
        """Return the value of CUDA_VISIBLE_DEVICES that makes the ranks see `devices`; None: leave it as it is."""
        if self.devices is None:
            return None
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(index) for index in range(max(self.devices) + 1)]
        return ",".join(names[index].strip() for index in self.devices)

    def _check_devices(self) -> None:
        if self.devices is not None:
            listed = ",".join(map(str, self.devices))
            if self.device_type == "cpu":
                raise RequestError(f"devices={listed} picks cards, and the device is cpu: drop one of them")
            if len(set(self.devices)) != len(self.devices) or any(index < 0 for index in self.devices):
                raise RequestError(f"devices={listed} must name each card once, from 0 on")
            if len(self.devices) != self.gpus:
                raise RequestError(f"devices={listed} contradicts gpus={self.gpus}: name as many, or drop one of them")
        if self.device_type == "cuda":
            _require_cards(self.gpus, self.devices)


def _require_cards(gpus: int, devices: tuple[int, ...] | None) -> None:
    count = torch.cuda.device_count()
    if count == 0:
        raise HardwareError(f"gpus={gpus}, and this machine has no usable NVIDIA card", hint="use --device cpu")
    cards = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(count)]
    there = f"this machine has {count}: {', '.join(cards)}"
    if gpus > count:
        raise HardwareError(f"gpus={gpus}, and {there}", hint=f"use --gpus {count}")
    absent = [index for index in devices or () if index >= count]
    if absent:
        raise HardwareError(f"devices={','.join(map(str, devices or ()))}: there is no cuda:{absent[0]}, and {there}")
