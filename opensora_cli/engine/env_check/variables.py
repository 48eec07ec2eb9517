"""Rules for environment variables of this machine, and for those that Dockerfiles and shell files set.

Most rules are a row of `_RULES`; a value with a form of its own has a function. torch itself judges the values that it
refuses, in a process of its own. Callers use this module before they import torch, which fails with such a value.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.python_processes import python_command, safe_environment
from opensora_cli.core.reading import read_text
from opensora_cli.core.redaction import is_relevant
from opensora_cli.engine.env_check.report import Finding, Severity, ok, problem, warning
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import ENVIRONMENT_PREFIX, read_environment

Variables = Mapping[str, str | None]
"""Values by name. None means unknown, as for a value that a script computes."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DEBUG, _LOGS = "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS"

_LARGEST_FILE_BYTES = 2**20
_LINE = re.compile(r"^[ \t]*(ENV|ARG|export)[ \t]+((?:\\\n|.)*)", re.MULTILINE)
_WORD = re.compile(r"""(?<!\S)\#.*|(?<!\S)([A-Za-z_]\w*)=("[^"\n]*"|'[^'\n]*'|[^\s;&|]*)""")
_OLD_ENV = re.compile(r"([A-Za-z_]\w*)[ \t]+([^=\n]+)")
"""Form of ENV in which everything after the name is the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts about the machine that decide whether a variable has an effect there."""

    uses_cuda: bool = False
    num_gpus: int = 0
    cores: int = 1
    has_nvlink: bool = False
    interfaces: tuple[str, ...] = ()
    """Network interfaces."""
    infiniband: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""
    shadowing: tuple[str, ...] = ()
    """Libraries in LD_LIBRARY_PATH that torch loads instead of its own."""


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """Fault of one variable."""

    name: str
    why: str
    fix: str | None = None
    when: Callable[[str], bool] | None = _is_on
    """Condition on the value. None means any value, also an unknown one."""
    message: str = "{name}={value}"
    severity: Severity = Severity.WARNING
    on_machine: Callable[[Surroundings], str | None] = lambda _: ""
    """Returns the end of the message for a machine, or None if the rule does not concern it."""


_UNSET = "unset it"
_READ_BY_NOTHING = {
    "CUDA_MEMORY_FRACTION": (
        "neither CUDA nor torch has such a variable",
        "PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.9",
    ),
    "NCCL_TREE_THRESHOLD": ("only NCCL 2.4 read it; newer ones choose for themselves", _UNSET),
    "NCCL_TIMEOUT": (
        "neither NCCL nor torch has such a variable",
        "the time limit is the timeout argument of init_process_group",
    ),
    "TORCH_CUDNN_V8_API_ENABLED": ("torch always uses this interface of cuDNN now", _UNSET),
    "HF_HUB_ENABLE_HF_TRANSFER": (
        "huggingface_hub no longer uses hf_transfer",
        "HF_XET_HIGH_PERFORMANCE=1 lets downloads use all cores and bandwidth",
    ),
    "TRANSFORMERS_CACHE": ("transformers 5 does not know it", "HF_HOME=DIR moves the cache"),
}
"""Reason and fix by name."""
_SLOW = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver, which waits for the GPU: meant for "
    "memory checkers",
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel, and copies no longer overlap: for debugging",
    "TORCH_NCCL_BLOCKING_WAIT": "the CPU waits for every collective; torch ends a hung run without it, too "
    "(asynchronous error handling)",
    "NCCL_BLOCKING_WAIT": "the CPU waits for every collective; and the name is an old one of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_SHM_DISABLE": "GPUs without a direct link then exchange through the network, not through shared memory",
}
"""Reason by name of a variable that costs time when it is on."""
_RULES = (
    *(
        _Rule(name=name, when=None, message="{name} is read by nothing", why=why, fix=fix)
        for name, (why, fix) in _READ_BY_NOTHING.items()
    ),
    *(_Rule(name=name, why=why, fix=_UNSET) for name, why in _SLOW.items()),
    _Rule(
        name="TORCH_DISTRIBUTED_DEBUG",
        when=lambda value: value.upper() == "DETAIL",
        message="{name}=DETAIL",
        why="further collectives before every collective check it",
        fix="unset it after debugging",
    ),
    _Rule(
        name="TORCH_DISTRIBUTED_DEBUG",
        when=lambda value: bool(refused_by_torch({"TORCH_DISTRIBUTED_DEBUG": value})),
        why="torch takes OFF, INFO and DETAIL, and cannot be imported with anything else",
        fix="OFF, INFO or DETAIL, or unset it",
        severity=Severity.PROBLEM,
    ),
    _Rule(
        name="TORCH_LOGS",
        when=lambda value: bool(refused_by_torch({"TORCH_LOGS": value})),
        why="torch takes names of its loggers, and cannot be imported with anything else",
        fix="names of loggers, as in +dynamo,guards, or unset it",
        severity=Severity.PROBLEM,
    ),
    _Rule(
        name="NCCL_P2P_DISABLE",
        on_machine=lambda here: " on a machine with NVLink" if here.has_nvlink else None,
        why="GPUs exchange through host memory instead of NVLink or PCI, many times slower",
        fix="unset it; if NCCL then hangs, switch off ACS or the IOMMU, which is what it works around",
    ),
    _Rule(
        name="NCCL_IB_DISABLE",
        on_machine=lambda here: f" with {', '.join(here.infiniband)} here" if here.infiniband else None,
        why="nodes exchange through TCP sockets instead of InfiniBand",
        fix="unset it; NCCL_IB_HCA chooses among adapters",
    ),
    _Rule(
        name="NCCL_ASYNC_ERROR_HANDLING",
        when=None,
        message="{name} is an old name",
        why="torch still reads it, with a warning for each process",
        fix="unset it: it is on by default; its name is TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    _Rule(
        name="NVIDIA_TF32_OVERRIDE",
        when=lambda value: value == "0",
        severity=Severity.NOTE,
        why="float32 products are computed in full precision, whatever a program asks for",
    ),
    _Rule(
        name="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        severity=Severity.NOTE,
        why="float32 products are computed in TF32: outputs in float32 differ in the third digit",
    ),
    *(
        _Rule(
            name=name,
            severity=Severity.NOTE,
            why="osora ckpt download fetches nothing; generating needs no network anyway",
        )
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ),
)


def refused_by_torch(environment: Mapping[str, str]) -> list[str]:
    """Return the variables whose values make the import of torch fail."""
    refused = [_DEBUG] if environment.get(_DEBUG, "OFF").upper() not in ("OFF", "INFO", "DETAIL") else []
    # Only torch knows the names of its loggers.
    if (loggers := environment.get(_LOGS)) and _LOGS in _errors("import torch", loggers=loggers):
        refused.append(_LOGS)
    return refused


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
    for rule in _RULES:
        value = known.get(rule.name)
        applies = rule.name in variables and (rule.when is None or (value is not None and rule.when(value)))
        concerned = "" if surroundings is None else rule.on_machine(surroundings)
        if applies and concerned is not None:
            message = rule.message.format(name=rule.name, value=value) + concerned
            found.append(
                Finding(severity=rule.severity, variable=rule.name, message=message, why=rule.why, fix=rule.fix)
            )
    found += _lint_threads(known.get("OMP_NUM_THREADS", ""), surroundings)
    if "CUDA_VISIBLE_DEVICES" in known:
        found += _lint_devices(known["CUDA_VISIBLE_DEVICES"])
    if surroundings is not None:
        found += _lint_interfaces(known, surroundings)
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
        if fault := allocator_fault(known.get(name, "")):
            # A build for the CPU never reads the variable.
            make = problem if uses_cuda else warning
            yield make(
                f"{name}: {fault}",
                why="torch stops when it first uses a GPU, with a message that names no variable",
                fix="see PYTORCH_ALLOC_CONF in torch's notes on CUDA",
                variable=name,
            )


def allocator_fault(text: str) -> str | None:
    """Return the reason for which torch refuses a value of `PYTORCH_ALLOC_CONF`, or None."""
    code = "import sys, torch; torch._C._accelerator_setAllocatorSettings(sys.argv[1])"
    lines = [line for line in _errors(code, text).splitlines() if "Error: " in line] if text else []
    # A torch without this function parses the options at the first use of a GPU alone.
    if not lines or lines[-1].startswith("AttributeError"):
        return None
    reason = lines[-1].partition("Error: ")[2].strip()
    return f"{text!r} is not of the form name:value,name:value" if "INTERNAL ASSERT" in reason else reason


@cache
def _errors(code: str, *arguments: str, loggers: str = "") -> str:
    """Return the stderr of Python code that fails. Empty if it succeeds, or if no process can be started."""
    without = {name: value for name, value in os.environ.items() if name not in (_DEBUG, _LOGS, *_ALLOCATOR_VARIABLES)}
    environment = safe_environment({**without, **({_LOGS: loggers} if loggers else {})})
    command = python_command("-c", code, *arguments)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except (OSError, ValueError):
        return ""
    return done.stderr if done.returncode else ""


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
    if value in ("", "-1"):
        yield warning(
            f"{name}={value} hides all GPUs",
            why="everything runs on the CPU",
            fix="unset it to use the GPUs",
            variable=name,
        )
    elif len(set(devices)) < len(devices) or not (
        all(device.isdigit() for device in devices) or all(device.startswith(("GPU-", "MIG-")) for device in devices)
    ):
        yield warning(
            f"{name}={value} is no list of different GPUs",
            why="CUDA takes numbers, or names from GPU-..., up to the first other entry; none if one is there twice",
            fix="list numbers as nvidia-smi shows them, as in 0,1",
            variable=name,
        )


def _lint_interfaces(known: Mapping[str, str], surroundings: Surroundings) -> Iterator[Finding]:
    interfaces = surroundings.interfaces
    fits = {
        "NCCL_SOCKET_IFNAME": lambda value: any(_nccl_uses(value, interface) for interface in interfaces),
        "GLOO_SOCKET_IFNAME": lambda value: all(name in interfaces for name in value.split(",")),
    }
    for name in fits:
        if (value := known.get(name)) and not fits[name](value):
            make = problem if surroundings.num_gpus > 1 else warning
            yield make(
                f"{name}={value} fits no network interface here",
                why="the processes of a run cannot connect, and it fails or hangs at its start",
                fix=f"unset it, or choose among {', '.join(interfaces)}",
                variable=name,
            )


def _nccl_uses(value: str, interface: str) -> bool:
    """Return whether NCCL uses an interface: prefixes, whole names after `=`, all others after `^` (its user guide)."""
    rest = value.removeprefix("^")
    names = tuple(name for name in rest.removeprefix("=").split(",") if name)
    is_named = interface in names if rest.startswith("=") else interface.startswith(names)
    return is_named is not value.startswith("^")


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
