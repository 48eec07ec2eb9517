"""Memory of the host whose pages stay in place: a device copies from it and to it by itself, while others compute.

torch's own page-locked memory comes in powers of two, which would be up to twice what weights or activations need.
"""

import mmap
from typing import Any

import torch
from torch import Tensor

from opensora_cli.core.exceptions import HardwareError

_PORTABLE = 1  # cudaHostRegisterPortable: for every device


def page_aligned(nbytes: int) -> Tensor:
    """Return (nbytes,) uint8 that begins with a page, and shares no page of memory with anything else."""
    page = mmap.PAGESIZE
    with torch.inference_mode(False):
        memory = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8)
        start = -memory.data_ptr() % page
        return memory[start : start + nbytes]


class PageLock:
    """Locks the pages of memory until it is released.

    Args:
        memory: of `page_aligned`; it must live as long as the lock.
        device: the CUDA device that copies; its context is made here, and on no other.

    Raises:
        HardwareError: the system refuses.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._memory: Tensor | None = memory
        self._device = device
        with torch.cuda.device(device):
            failed = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if failed:
            self._memory = None
            raise HardwareError(
                f"{memory.nbytes} bytes of memory cannot be page-locked",
                hint="raise the limit of locked memory (ulimit -l), or do without: --set memory.host_weights=mapped",
            )

    def release(self) -> None:
        """Unlock the pages, when the device is done with them; again has no effect."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _cudart().cudaHostUnregister(memory.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
