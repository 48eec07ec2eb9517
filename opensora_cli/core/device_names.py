"""Names of devices, for settings and messages. torch is not imported."""

GPU = "cuda"
"""Type of NVIDIA GPUs, and of AMD GPUs with a ROCm build of torch."""
UNTESTED = ("xpu", "npu", "mps")
"""Types of accelerators that are accepted where torch has them: Intel, Huawei, and Apple."""
ACCELERATORS = (GPU, *UNTESTED)

KIND_PATTERN = f"auto|cpu|{'|'.join(ACCELERATORS)}"
KIND_RULE = "must be auto, cpu or cuda (untested: xpu, npu and mps)"
PATTERN = rf"auto|cpu|({'|'.join(ACCELERATORS)})(:\d+)?"
RULE = "must be auto, cpu, cuda or cuda:N, as in cuda:1 (untested: xpu, npu and mps)"
HELP = "auto, cpu, cuda or cuda:N."


def type_of(name: str) -> str:
    """Return the type in the name of a device: `cuda` for `cuda:1`."""
    return name.partition(":")[0]


def type_of_ranks(name: str) -> str:
    """Return the type of several ranks' devices for a setting: `auto` means GPUs, because numbered devices are GPUs."""
    return GPU if name == "auto" else type_of(name)


def has_index(name: str) -> bool:
    """Return whether a name is that of one accelerator: `cuda:1`, not `cuda`."""
    return ":" in name


def indexed(index: int) -> str:
    return f"{GPU}:{index}"
