"""What is known about a machine, as plain data that tests can make up."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonFacts:
    """The interpreter and the packages that osora needs."""

    version: tuple[int, int, int]
    executable: str
    unmet: tuple[str, ...] = ()
    """Requirements of osora that are not installed, or in another version, each in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """How torch was built, and what it sees."""

    version: str
    cuda: str | None = None
    """The CUDA version that it was built for; None: a build for the CPU."""
    architectures: tuple[str, ...] = ()
    """What its kernels were compiled for: `sm_90`, `compute_90`."""
    cuda_available: bool = False
    nccl: str | None = None
    cudnn: str | None = None
    matmul_precision: str = "none"
    """`torch.backends.cuda.matmul.fp32_precision`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """A CUDA device, as torch sees it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    is_mig: bool = False
    """Whether it is a slice of a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """What the NVIDIA driver says, whatever torch is."""

    version: str | None = None
    """None: there is no driver."""
    cards: tuple[str, ...] = ()
    """Names of the cards in the machine."""
    failure: str | None = None
    """What nvidia-smi says where it is there and fails."""

    @property
    def major(self) -> int | None:
        """The part of the version that compatibility goes by."""
        head = (self.version or "").partition(".")[0]
        return int(head) if head.isdigit() else None


class LinkKind(StrEnum):
    """How two cards reach each other."""

    NVLINK = "NVLink"
    PEER = "PCI, card to card"
    HOST = "through host memory"


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """The way between two cards."""

    first: int
    second: int
    kind: LinkKind


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The computer around the cards."""

    cores: int
    """Logical ones that this process may use."""
    total_bytes: int
    available_bytes: int
    container_limit_bytes: int | None = None
    """What the control group of this process may use; None: no limit."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    locked_memory_bytes: int | None = None
    """The limit of locked memory (ulimit -l); None: no limit."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces."""
    infiniband: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""

    @property
    def usable_bytes(self) -> int:
        """Host memory that is free for a run."""
        limit = self.container_limit_bytes
        return self.available_bytes if limit is None else min(self.available_bytes, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFacts:
    """The released model's weights on this machine, and the disk they go to."""

    missing: tuple[str, ...]
    """Parts that are not there."""
    missing_bytes: int
    """What these take on disk, in 16 bits."""
    largest_bytes: int
    """The largest part in 16 bits, which offload keeps in host memory."""
    folder: str
    free_disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """A way to compute attention."""

    name: str
    package: str | None
    """The version of its package; None: it is not installed. Empty: part of torch."""
    in_registry: bool
    """Whether osora can use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """PyAV, which writes videos."""

    av: str
    has_x264: bool
