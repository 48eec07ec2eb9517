"""Rules for environment variables of this machine, and for those that Dockerfiles and shell files set."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.formatting import nearest
from opensora_cli.core.reading import read_text
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import Finding, ok, problem, warning
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import ENVIRONMENT_PREFIX, read_environment

Variables = Mapping[str, str | None]
"""Values by name. None means unknown, as for a value that a script computes."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_ALLOCATOR_OPTIONS = (
    "backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "large_segment_size_mb", "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction",
    "pinned_free_catch_all", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "pinned_use_background_threads",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc", "roundup_power2_divisions", "throw_on_cudamalloc_oom",
)  # fmt: skip
"""Options of torch 2.13. A torch that is built for the CPU accepts any name."""
_OPTION = re.compile(r"([^\s\d>,:\[\]][^\s,:\[\]]*)\s*:")

_LARGEST_FILE_BYTES = 2**20
_LINE = re.compile(r"^[ \t]*(ENV|ARG|export)[ \t]+((?:\\\n|.)*)", re.MULTILINE)
_WORD = re.compile(r"""(?<!\S)\#.*|(?<!\S)([A-Za-z_]\w*)=("[^"\n]*"|'[^'\n]*'|[^\s;&|]*)""")
_OLD_ENV = re.compile(r"([A-Za-z_]\w*)[ \t]+([^=\n]+)")
"""Form of ENV in which everything after the name is the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts about the machine that decide whether a variable has an effect there."""

    uses_cuda: bool = False
    cores: int = 1
    has_nvlink: bool = False
    has_infiniband: bool = False
    """Whether there are InfiniBand or RoCE adapters."""
    shadowing: tuple[str, ...] = ()
    """Libraries in LD_LIBRARY_PATH that torch loads instead of its own."""


def _is_on(value: str | None) -> bool:
    return value is not None and value.lower() in ("1", "true", "yes", "on")


def _is_set(_value: str | None) -> bool:
    return True


class _Rule(NamedTuple):
    """Fault of a variable that costs time, or that nothing reads."""

    name: str
    why: str
    fix: str = "unset it"
    is_fault: Callable[[str | None], bool] = _is_on
    """Judges the value. None means an unknown value."""
    applies: Callable[[Surroundings], bool] = lambda _: True
    """Returns whether the rule concerns a machine."""


_RULES = (
    _Rule(
        "CUDA_MEMORY_FRACTION",
        "nothing reads it: neither CUDA nor torch has such a variable",
        "PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.9",
        _is_set,
    ),
    _Rule("NCCL_TREE_THRESHOLD", "only NCCL 2.4 read it; newer ones choose for themselves", is_fault=_is_set),
    _Rule(
        "NCCL_TIMEOUT",
        "nothing reads it: neither NCCL nor torch has such a variable",
        "the time limit is the timeout argument of init_process_group",
        _is_set,
    ),
    _Rule(
        "HF_HUB_ENABLE_HF_TRANSFER",
        "huggingface_hub no longer uses hf_transfer",
        "HF_XET_HIGH_PERFORMANCE=1 lets downloads use all cores and bandwidth",
        _is_set,
    ),
    _Rule("TRANSFORMERS_CACHE", "transformers 5 does not know it", "HF_HOME=DIR moves the cache", _is_set),
    _Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "every tensor is allocated by the driver, which waits for the GPU: meant for memory checkers",
    ),
    _Rule("CUDA_LAUNCH_BLOCKING", "the CPU waits for every kernel, and copies no longer overlap: meant for debugging"),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", "the CPU waits for every collective; torch ends a hung run without it, too"),
    _Rule(
        "NCCL_BLOCKING_WAIT",
        "the CPU waits for every collective; and the name is an old one of TORCH_NCCL_BLOCKING_WAIT",
    ),
    _Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        "further collectives before every collective check it",
        "unset it after debugging",
        lambda value: value is not None and value.upper() == "DETAIL",
    ),
    _Rule(
        "NCCL_SHM_DISABLE",
        "GPUs without a direct link then exchange through the network, not through shared memory",
    ),
    _Rule(
        "NCCL_P2P_DISABLE",
        "GPUs exchange through host memory instead of NVLink or PCI, many times slower",
        "unset it; if NCCL then hangs, switch off ACS or the IOMMU, which is what it works around",
        applies=lambda here: here.has_nvlink,
    ),
    _Rule(
        "NCCL_IB_DISABLE",
        "nodes exchange through TCP sockets instead of InfiniBand",
        "unset it; NCCL_IB_HCA chooses among adapters",
        applies=lambda here: here.has_infiniband,
    ),
)


def lint_file(path: Path) -> list[Finding]:
    """Return the findings about the variables that a Dockerfile or a shell file sets, in the order of its lines.

    Only lines that begin with `ENV`, `ARG` or `export` count, and the last assignment of a variable. Nothing is
    expanded: a value with `$` or a backquote counts as unknown. Raises FileProblem if the file cannot be read, or is
    not text.
    """
    text = read_text(path, max_bytes=_LARGEST_FILE_BYTES, hint="name a Dockerfile or a shell file")
    values, lines = dict[str, str | None](), dict[str, int]()
    for line in _LINE.finditer(text):
        keyword, rest = line.groups()
        old = _OLD_ENV.fullmatch(rest) if keyword == "ENV" else None
        for word in [old] if old else _WORD.finditer(rest):
            name, value = word.groups()
            if name is not None and is_relevant(name):
                values[name] = None if "$" in value or "`" in value else value.strip().strip("\"'")
                lines[name] = text.count("\n", 0, line.start(2) + word.start()) + 1
    findings = [
        finding.model_copy(update={"line": lines[str(finding.variable)]}) for finding in lint_variables(values, None)
    ]
    findings = findings or [ok(f"nothing wrong with {len(values)} variables that matter here")]
    findings.sort(key=lambda finding: finding.line or 0)
    return [finding.model_copy(update={"check": "file", "file": str(path)}) for finding in findings]


def lint_variables(variables: Variables, surroundings: Surroundings | None) -> list[Finding]:
    """Return the faults of environment variables on the machine `surroundings`.

    None means another machine, as for a file: then only the rules that hold on any machine apply.
    """
    known = {name: value.strip() for name, value in variables.items() if value is not None}
    found = list(_lint_allocator(known, uses_cuda=surroundings is None or surroundings.uses_cuda))
    for name, why, fix, is_fault, applies in _RULES:
        if name in variables and (surroundings is None or applies(surroundings)) and is_fault(known.get(name)):
            message = f"{name}={known[name]}" if name in known else name
            found.append(warning(message, why=why, fix=fix, variable=name))
    found += _lint_threads(known.get("OMP_NUM_THREADS", ""), surroundings)
    if "CUDA_VISIBLE_DEVICES" in known:
        found += _lint_devices(known["CUDA_VISIBLE_DEVICES"])
    if surroundings is not None and surroundings.shadowing:
        # torch finds its libraries by RUNPATH, which comes after this variable (ld.so(8)).
        found.append(
            warning(
                f"LD_LIBRARY_PATH hides torch's own libraries: {', '.join(surroundings.shadowing)}",
                why="torch loads these instead of the ones that it was built with",
                fix="take their folders out of LD_LIBRARY_PATH",
                variable="LD_LIBRARY_PATH",
            )
        )
    return [*found, *_lint_own(variables)]


def _lint_allocator(known: Mapping[str, str], *, uses_cuda: bool) -> Iterator[Finding]:
    new, old = _ALLOCATOR_VARIABLES
    if known.get(new) and known.get(old):
        yield warning(
            f"{old} stands beside {new}",
            why=f"torch takes some options from the one and some from the other: the backend from {old}, "
            f"fragmentation from {new}",
            fix=f"put all into {new}, and unset {old}",
            variable=old,
        )
    for name in _ALLOCATOR_VARIABLES:
        why = "torch stops when it first uses a GPU, with a message that names no variable"
        fix = "see PYTORCH_ALLOC_CONF in torch's notes on CUDA"
        text = known.get(name, "")
        if fault := allocator_fault(text):
            # A build for the CPU never reads the variable.
            make = problem if uses_cuda else warning
            yield make(f"{name}: {fault}", why=why, fix=fix, variable=name)
        elif unknown := next((option for option in _OPTION.findall(text) if option not in _ALLOCATOR_OPTIONS), None):
            close = nearest(unknown, _ALLOCATOR_OPTIONS)
            fix = f"did you mean {close}?" if close else fix
            yield warning(f"{name}: {unknown} is not an option of torch 2.13", why=why, fix=fix, variable=name)


def allocator_fault(text: str) -> str | None:
    """Return the reason for which torch refuses a value of `PYTORCH_ALLOC_CONF`, or None."""
    # A torch without this function parses the options at the first use of a GPU alone.
    judge = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    try:
        if text and judge is not None:
            judge(text)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].strip()
        # A running process keeps its backend.
        if "load time" in reason:
            return None
        return f"{text!r} is not of the form name:value,name:value" if "INTERNAL ASSERT" in reason else reason
    return None


def _lint_threads(value: str, surroundings: Surroundings | None) -> Iterator[Finding]:
    # A list is for nested regions. The first number counts.
    first = value.partition(",")[0].strip()
    threads = int(first) if first.isdigit() else 0
    most = threads if surroundings is None else surroundings.cores
    if value and not 1 <= threads <= most:
        yield warning(
            f"OMP_NUM_THREADS={value} is no number of threads" + (f" for {most} cores" if surroundings else ""),
            why="OpenMP ignores a wrong number, and threads that wait for each other to get a core are slow",
            fix="unset it: torch takes one thread for each core",
            variable="OMP_NUM_THREADS",
        )


def _lint_devices(value: str) -> Iterator[Finding]:
    name, devices = "CUDA_VISIBLE_DEVICES", [device.strip() for device in value.split(",")]
    is_list = all(each.isdigit() for each in devices) or all(each.startswith(("GPU-", "MIG-")) for each in devices)
    if not is_list or len(set(devices)) < len(devices):
        yield warning(
            f"{name}={value} is no list of different GPUs",
            why="CUDA takes numbers, or names from GPU-..., up to the first other entry; none if one is there twice",
            fix="list numbers as nvidia-smi shows them, as in 0,1, or unset it to use all GPUs",
            variable=name,
        )


def _lint_own(variables: Variables) -> Iterator[Finding]:
    for name in sorted(variables):
        if not name.startswith(ENVIRONMENT_PREFIX) or variables[name] == "":
            continue
        try:
            read_environment(GenerateSettings, {name: variables[name] or "any"})
        except RequestError as error:
            yield problem(
                f"{name} is not a setting",
                why="osora refuses variables of its own form that it does not know",
                fix=error.hint or "unset it",
                variable=name,
            )
