"""Rules for environment variables. Pure: a mapping of variables goes in, findings come out."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.env_check.allocator import find_faults
from opensora_cli.engine.env_check.findings import Check, Finding
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import ENVIRONMENT_PREFIX, read_environment
from opensora_cli.settings.train import TrainSettings

Variables = Mapping[str, str]

_CHECK = Check("environment")
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What rules must know of the machine that the variables are for."""

    uses_cuda: bool
    num_cards: int
    cores: int
    has_nvlink: bool
    interfaces: tuple[str, ...]
    infiniband: tuple[str, ...]
    shadowing: tuple[str, ...] = ()
    """Libraries in LD_LIBRARY_PATH that torch would load instead of its own."""


def lint_variables(variables: Variables, surroundings: Surroundings | None) -> list[Finding]:
    """Return what is wrong with environment variables.

    Args:
        variables: names and values; one that is not known is empty.
        surroundings: the machine they are for. None: another one, as for a file; then rules that depend on a machine
            take the one that is meant, with cards, and leave out what cannot be known of it.
    """
    return [finding for rule in _RULES for finding in rule(variables, surroundings)]


def lint_names(names: Iterable[str]) -> list[Finding]:
    """Return what is wrong with variables whatever their values are."""
    variables = dict.fromkeys(names, "any")
    return [finding for rule in (_lint_unread, _lint_own) for finding in rule(variables, None)]


def _lint_allocator(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    # A build for the CPU never reads these.
    fatal = surroundings is None or surroundings.uses_cuda
    new, old = _ALLOCATOR_NAMES
    if variables.get(new) and variables.get(old):
        yield _CHECK.warning(
            f"{old} stands beside {new}",
            why=f"torch takes some options from the one and some from the other: the backend from {old}, "
            f"fragmentation from {new}",
            mend=f"put all into {new}, and unset {old}",
            variable=old,
        )
    for name in _ALLOCATOR_NAMES:
        for fault in find_faults(variables.get(name, "")):
            make = _CHECK.problem if fault.is_fatal and fatal else _CHECK.warning
            yield make(f"{name}: {fault.message}", why=fault.why, mend=fault.mend, variable=name)
    if _is_on(variables, "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        yield _CHECK.warning(
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
            why="every tensor is allocated by the driver, which waits for the card: meant for memory checkers",
            mend="unset it",
            variable="PYTORCH_NO_CUDA_MEMORY_CACHING",
        )


@dataclass(frozen=True, slots=True)
class _Unread:
    """Why nothing reads a variable, and what does its work."""

    why: str
    mend: str


_UNREAD = {
    "CUDA_MEMORY_FRACTION": _Unread(
        "neither CUDA nor torch has such a variable",
        "PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.9",
    ),
    "NCCL_TREE_THRESHOLD": _Unread("it was of NCCL 2.4 alone; newer ones choose for themselves", "unset it"),
    "NCCL_TIMEOUT": _Unread(
        "neither NCCL nor torch has such a variable",
        "the time limit is the timeout argument of init_process_group",
    ),
    "TORCH_CUDNN_V8_API_ENABLED": _Unread("torch always uses this interface of cuDNN now", "unset it"),
    "HF_HUB_ENABLE_HF_TRANSFER": _Unread(
        "huggingface_hub no longer uses hf_transfer", "HF_XET_HIGH_PERFORMANCE=1 makes downloads take all they can get"
    ),
    "TRANSFORMERS_CACHE": _Unread("transformers 5 does not know it", "HF_HOME=DIR moves the cache"),
}


def _lint_unread(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    for name, unread in _UNREAD.items():
        if name in variables:
            yield _CHECK.warning(f"{name} is read by nothing", why=unread.why, mend=unread.mend, variable=name)


@dataclass(frozen=True, slots=True)
class _Slow:
    """What switching a variable on costs."""

    why: str
    mend: str = "unset it"


_SLOW = {
    "CUDA_LAUNCH_BLOCKING": _Slow("the CPU waits for every kernel, and copies no longer overlap: for debugging"),
    "TORCH_NCCL_BLOCKING_WAIT": _Slow(
        "the CPU waits for every collective; torch ends a run that hangs without it, too (asynchronous error handling)"
    ),
    "NCCL_BLOCKING_WAIT": _Slow(
        "the CPU waits for every collective; and the name is an old one of TORCH_NCCL_BLOCKING_WAIT"
    ),
    "NCCL_SHM_DISABLE": _Slow("cards without a direct link then talk through the network, not through shared memory"),
}


def _lint_slow(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    for name, slow in _SLOW.items():
        if _is_on(variables, name):
            yield _CHECK.warning(f"{name}={variables[name]}", why=slow.why, mend=slow.mend, variable=name)
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield _CHECK.warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL",
            why="every collective is checked by others that go before it",
            mend="unset it after debugging",
            variable="TORCH_DISTRIBUTED_DEBUG",
        )


def _lint_nccl(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    # On a machine that is not known, nothing should be switched off that it may have.
    if _is_on(variables, "NCCL_P2P_DISABLE") and (surroundings is None or surroundings.has_nvlink):
        yield _CHECK.warning(
            "NCCL_P2P_DISABLE=1" + ("" if surroundings is None else " on a machine with NVLink"),
            why="cards exchange through host memory instead of NVLink or PCI, many times slower",
            mend="unset it; if NCCL then hangs, switch off ACS or the IOMMU, which is what it works around",
            variable="NCCL_P2P_DISABLE",
        )
    if _is_on(variables, "NCCL_IB_DISABLE") and (surroundings is None or surroundings.infiniband):
        yield _CHECK.warning(
            "NCCL_IB_DISABLE=1" + ("" if surroundings is None else f" with {', '.join(surroundings.infiniband)} here"),
            why="nodes exchange through TCP sockets instead of InfiniBand",
            mend="unset it; NCCL_IB_HCA chooses among adapters",
            variable="NCCL_IB_DISABLE",
        )
    if "NCCL_ASYNC_ERROR_HANDLING" in variables:
        yield _CHECK.warning(
            "NCCL_ASYNC_ERROR_HANDLING is an old name",
            why="torch still reads it, with a warning for each process",
            mend="unset it: it is on by default; its name is TORCH_NCCL_ASYNC_ERROR_HANDLING",
            variable="NCCL_ASYNC_ERROR_HANDLING",
        )
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if surroundings is not None and variables.get(name):
            yield from _lint_interface(name, variables[name], surroundings)


def _lint_interface(name: str, value: str, surroundings: Surroundings) -> Iterator[Finding]:
    if name.startswith("NCCL"):
        fits = bool(matching_interfaces(value, surroundings.interfaces))
    else:  # gloo takes whole names
        fits = all(part in surroundings.interfaces for part in value.split(","))
    if fits:
        return
    make = _CHECK.problem if surroundings.num_cards > 1 else _CHECK.warning
    yield make(
        f"{name}={value} fits no network interface here",
        why="processes of a run find no way to each other, and it fails or hangs at its start",
        mend=f"unset it, or choose among {', '.join(surroundings.interfaces)}",
        variable=name,
    )


def matching_interfaces(value: str, interfaces: tuple[str, ...]) -> list[str]:
    """Return the interfaces that a value of `NCCL_SOCKET_IFNAME` lets NCCL use.

    It lists beginnings of names, after `=` whole names, and after `^` those that are not to be used (NCCL user guide).
    """
    excludes = value.startswith("^")
    rest = value.removeprefix("^")
    is_exact = rest.startswith("=")
    names = [name for name in rest.removeprefix("=").split(",") if name]

    def is_named(interface: str) -> bool:
        return interface in names if is_exact else interface.startswith(tuple(names))

    return [interface for interface in interfaces if is_named(interface) is not excludes]


def _lint_libraries(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    if surroundings is None or not surroundings.shadowing:
        return
    # torch finds its own by RUNPATH, which comes after this variable (ld.so(8)).
    yield _CHECK.warning(
        f"LD_LIBRARY_PATH hides torch's own libraries: {', '.join(surroundings.shadowing)}",
        why="torch loads these instead of those that it was built and tested with",
        mend="take their folders out of LD_LIBRARY_PATH",
        variable="LD_LIBRARY_PATH",
    )


def _lint_threads(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    value = variables.get("OMP_NUM_THREADS", "").strip()
    if not value:
        return
    # A list is for nested regions; the first number is what counts.
    first = value.partition(",")[0].strip()
    if not first.isdigit() or int(first) == 0:
        yield _CHECK.warning(
            f"OMP_NUM_THREADS={value} is not a number of threads",
            why="OpenMP ignores it",
            mend="unset it: torch takes one thread for each core",
            variable="OMP_NUM_THREADS",
        )
    elif surroundings is not None and int(first) > surroundings.cores:
        yield _CHECK.warning(
            f"OMP_NUM_THREADS={value} on {surroundings.cores} cores",
            why="threads wait for each other to get a core: slower than fewer of them",
            mend="unset it, or use at most the number of cores",
            variable="OMP_NUM_THREADS",
        )


def _lint_devices(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    name = "CUDA_VISIBLE_DEVICES"
    if name not in variables:
        return
    value = variables[name].strip()
    devices = [device.strip() for device in value.split(",")]
    numbers = [device for device in devices if re.fullmatch(r"-?\d+", device)]
    odd = [device for device in devices if device not in numbers and not device.startswith(("GPU-", "MIG-"))]
    message, why, mend = "", "", "list numbers as nvidia-smi shows them, as in 0,1"
    if value in ("", "-1"):
        message, why, mend = "hides all cards", "everything runs on the CPU", "unset it to use the cards"
    elif odd:
        message = f"has {', '.join(map(repr, odd))} in it"
        why = "CUDA reads up to the first that is no number and no GPU-... name, and hides the rest"
    elif any(number.startswith("-") for number in numbers):
        message, why = "has a negative number in it", "CUDA hides this card and all that follow"
    elif len(set(devices)) < len(devices):
        message, why = "names a card twice", "CUDA then finds no card at all"
    elif numbers and len(numbers) < len(devices):
        message, why = "mixes numbers and names", "CUDA takes either, not both"
    if message:
        yield _CHECK.warning(f"{name}={value} {message}", why=why, mend=mend, variable=name)


def _lint_precision(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    if variables.get("NVIDIA_TF32_OVERRIDE", "").strip() == "0":
        yield _CHECK.note(
            "NVIDIA_TF32_OVERRIDE=0",
            why="float32 products are computed in full precision, whatever a program asks for",
            variable="NVIDIA_TF32_OVERRIDE",
        )
    if _is_on(variables, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        yield _CHECK.note(
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",
            why="float32 products are computed in TF32: outputs in float32 differ in the third digit",
            variable="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        )


def _lint_hub(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if _is_on(variables, name):
            yield _CHECK.note(
                f"{name}={variables[name]}",
                why="osora ckpt download fetches nothing; generating needs no network anyway",
                variable=name,
            )


def _lint_own(variables: Variables, surroundings: Surroundings | None) -> Iterator[Finding]:
    for name in sorted(variables):
        if not name.startswith(ENVIRONMENT_PREFIX) or not variables[name]:
            continue
        try:
            read_environment(GenerateSettings, {name: variables[name]}, others=(TrainSettings,))
        except RequestError as error:
            yield _CHECK.problem(
                f"{name} is not a setting",
                why="osora refuses variables of its own form that it does not know",
                mend=error.hint or "unset it",
                variable=name,
            )


def _is_on(variables: Variables, name: str) -> bool:
    return variables.get(name, "").strip().lower() in _TRUE


_Rule = Callable[[Variables, Surroundings | None], Iterator[Finding]]
_RULES: tuple[_Rule, ...] = (
    _lint_allocator,
    _lint_unread,
    _lint_slow,
    _lint_nccl,
    _lint_libraries,
    _lint_threads,
    _lint_devices,
    _lint_precision,
    _lint_hub,
    _lint_own,
)
