"""Checks of `osora env-check`, in the order in which they are printed."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

import opensora_cli
from opensora_cli.core import device_facts
from opensora_cli.core.device_facts import GpuFacts, LinkFacts, LinkKind
from opensora_cli.core.exceptions import OsoraError
from opensora_cli.core.limits import read_cores
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.core.redaction import Redactor, is_relevant, shown_variables
from opensora_cli.engine.env_check import machine
from opensora_cli.engine.env_check.report import EnvReport, Finding, Severity, ok
from opensora_cli.engine.env_check.variables import Surroundings, lint_file, lint_variables
from opensora_cli.settings.tools import EnvCheckSettings

FactT = TypeVar("FactT")

_ALL_REDUCE_BYTES = {"cuda": "64MiB", "cpu": "4MiB"}
_GRACE_S = 10.0
"""Seconds for the launcher to end its ranks."""
_GLOO_FIX = "make the name of this machine lead to itself (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo"


def env_check(
    settings: EnvCheckSettings,
    *,
    environment: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
) -> EnvReport:
    """Check this machine, its environment variables and the given files.

    Raises FileProblem if a file cannot be read.
    """
    variables = os.environ if environment is None else environment
    # First, so that a misspelled name is refused at once.
    in_files = [finding for name in settings.files for finding in lint_file(Path(name))]
    findings = _check_machine(variables, settings, reporter or SilentReporter())
    report = EnvReport(
        osora=opensora_cli.__version__,
        platform=platform.platform(),
        fine=all(finding.severity is not Severity.PROBLEM for finding in (*findings, *in_files)),
        findings=(*findings, *in_files),
        environment=shown_variables(variables),
    )
    if not settings.bug_report:
        return report
    return report.bug_report(Redactor.of_this_machine())


def _check_machine(environment: Mapping[str, str], settings: EnvCheckSettings, reporter: Reporter) -> list[Finding]:
    """Return the findings in the order in which they are printed."""
    # Each kind of fact is read once, when a check first needs it.
    built, driver = cache(device_facts.read_torch), cache(device_facts.read_driver)
    gpus, weights = cache(device_facts.read_gpus), cache(lambda: machine.read_weights(environment))
    links = cache(lambda: device_facts.read_links(gpus()))

    def check_variables() -> Iterable[Finding]:
        uses_cuda, own = _or_else(lambda: built().cuda is not None, False), Path(torch.__file__).parents[1]
        surroundings = Surroundings(
            uses_cuda=uses_cuda,
            cores=read_cores()[0],
            has_nvlink=any(link.kind is LinkKind.NVLINK for link in _or_else(links, tuple[LinkFacts, ...]())),
            has_infiniband=Path("/sys/class/infiniband").is_dir(),
            shadowing=machine.shadowing_libraries(environment, own=own) if uses_cuda else (),
        )
        count = sum(map(is_relevant, environment))
        return lint_variables(environment, surroundings) or [
            ok(f"nothing wrong with {count} variables that matter here")
        ]

    def reduce_over_all() -> Iterable[Finding]:
        num_gpus = len(_or_else(gpus, tuple[GpuFacts, ...]()))
        with reporter.stage("all-reduce"):
            return list(
                check_all_reduce(num_gpus=num_gpus, seconds=settings.all_reduce_seconds, environment=environment)
            )

    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "python": machine.check_python,
        "torch": lambda: machine.check_torch(built(), driver()),
        "cards": lambda: machine.check_gpus(built(), gpus()),
        "links": lambda: machine.check_links(links()),
        "attention": machine.check_attention,
        "video": machine.check_encoder,
        "memory": lambda: machine.check_memory(weights(), has_gpus=bool(gpus())),
        "disk": lambda: machine.check_disk(weights()),
        "limits": machine.check_shared_memory,
        "environment": check_variables,
        **({"all-reduce": reduce_over_all} if settings.all_reduce else {}),
    }
    findings = list[Finding]()
    for name, check in checks.items():
        try:
            found = list(check())
        except Exception as error:
            # Drivers and libraries raise anything, and one failure must not hide the findings of the other checks.
            text = (error.message if isinstance(error, OsoraError) else str(error)) or type(error).__name__
            reason = " ".join(text.split())[:300]
            found = [Finding(severity=Severity.UNKNOWN, message=f"could not be checked: {reason}")]
        findings += [finding.model_copy(update={"check": name}) for finding in found]
    return findings


def _or_else(read: Callable[[], FactT], default: FactT) -> FactT:
    """Return a fact, or `default` where it cannot be read: its own check reports the reason."""
    try:
        return read()
    except Exception:
        return default


def check_all_reduce(
    *, num_gpus: int, seconds: float, environment: Mapping[str, str], command: Sequence[str] | None = None
) -> Iterator[Finding]:
    """Reduce over all GPUs with NCCL, or over two processes with gloo if there are no GPUs, and judge the result.

    `seconds` is the timeout, after which all processes are ended. `command` replaces `osora bench-comm`.
    """
    device, ranks = ("cuda", num_gpus) if num_gpus else ("cpu", 2)
    over = f"nccl over {ranks} GPU{'' if ranks == 1 else 's'}" if num_gpus else "gloo over 2 processes"
    size = _ALL_REDUCE_BYTES[device]
    words = f"bench-comm --device {device} --gpus {ranks} --collective all_reduce --min-bytes {size} --max-bytes {size}"
    asked = [*module_command("opensora_cli"), *words.split(), "--iters", "5", "--warmup", "2", "--json", "--quiet"]
    # A session of its own, so that Ctrl-C reaches this process alone.
    process = subprocess.Popen(
        asked if command is None else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=safe_environment(environment),
        text=True,
        errors="replace",
        start_new_session=True,
    )
    severity = Severity.PROBLEM if num_gpus > 1 else Severity.WARNING
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        yield Finding(
            severity=severity,
            message=f"{over} does not end within {seconds:g} s",
            why="it hangs, as a run over several devices would, or the machine is busy",
            fix="--timeout 300 tells a busy machine from a hang. Then "
            + ("try NCCL_P2P_DISABLE=1, and check NCCL_SOCKET_IFNAME and /etc/hosts" if num_gpus else _GLOO_FIX),
        )
        return
    finally:
        _end(process)
    if process.returncode:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
        yield Finding(
            severity=severity,
            message=f"{over} fails: {reason.removeprefix('error: ')[:300] or f'exit code {process.returncode}'}",
            why="a run over several devices would fail in the same way",
            fix="NCCL_DEBUG=INFO osora env-check reports more" if num_gpus else _GLOO_FIX,
        )
        return
    for row in json.loads(output)["rows"]:
        rate = f", {row['bus_bandwidth_gb_per_s']:.1f} GB/s on the bus" if ranks > 1 else ""
        yield ok(f"{over}: {row['size_bytes'] / 2**20:.0f} MiB in {row['avg_s'] * 1e3:.1f} ms{rate}")


def _end(process: "subprocess.Popen[str]") -> None:
    """End the launcher and its session. Its ranks end with it."""
    if process.poll() is not None:
        return
    if sys.platform == "win32":
        process.kill()
        process.communicate()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_S)
            return
