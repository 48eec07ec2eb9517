"""All-reduce over the devices of this machine: `osora bench-comm` in a process of its own, which may hang."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from opensora_cli.core.python_processes import module_command, safe_environment
from opensora_cli.engine.env_check.report import Finding, Severity, ok

_BYTES = {"cuda": "64MiB", "cpu": "4MiB"}
_GRACE_S = 10.0
"""Seconds for the launcher to end its ranks."""


def check_all_reduce(
    *, num_gpus: int, seconds: float, environment: Mapping[str, str], command: Sequence[str] | None = None
) -> Iterator[Finding]:
    """Reduce over all GPUs with NCCL, or over two processes with gloo if there are no GPUs, and judge the result.

    `seconds` is the timeout, after which all processes are ended. `command` replaces `osora bench-comm`.
    """
    device, ranks = ("cuda", num_gpus) if num_gpus else ("cpu", 2)
    over = f"nccl over {ranks} GPU{'' if ranks == 1 else 's'}" if num_gpus else "gloo over 2 processes"
    size = _BYTES[device]
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


_GLOO_FIX = "make the name of this machine lead to itself (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo"


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
