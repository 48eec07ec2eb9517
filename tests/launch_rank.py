"""A rank for the tests of the launcher: goes through stages, and in one of them one rank does something else.

`launch_rank.py MARK --rank 1 --stage denoise --act kill`. Without `--gloo` it needs no torch, and starts at once.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil

from opensora_cli.core.exceptions import CheckpointError, OsoraError, OutputError
from opensora_cli.core.files import temporary_name
from opensora_cli.core.locks import locked_file
from opensora_cli.core.ranks import (
    INTERRUPTED,
    RankContext,
    beat,
    find_context,
    linked,
    report_bug,
    report_failure,
    report_left,
)

STAGES = ("load", "denoise", "decode")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mark", type=Path)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--stage", default="denoise")
    parser.add_argument("--act", default="none")
    parser.add_argument("--gloo", action="store_true")
    asked = parser.parse_args(arguments)
    context = find_context(os.environ)
    assert context is not None
    if asked.stage == "start":
        act(asked, context, "start")
    with linked(context):
        try:
            work(asked, context)
        except OsoraError as error:
            report_failure(error.message, hint=error.hint, exit_code=error.exit_code)
            return error.exit_code
        except KeyboardInterrupt:
            if asked.act == "fail to save":
                report_failure("the disk is full", hint="make room there", exit_code=OutputError.exit_code)
                return OutputError.exit_code
            report_failure("interrupted", hint=f"kept by rank {context.rank}", exit_code=INTERRUPTED)
            return INTERRUPTED
        except Exception as error:
            report_bug(error)
            return 1
    # In one write: ranks may share a pipe.
    sys.stdout.write(f"result of rank {context.rank} of {context.world_size} on {context.nnodes}\n")
    return 0


def work(asked: argparse.Namespace, context: RankContext) -> None:
    if asked.gloo:
        from opensora_cli.engine.launch.rank import joined
    with joined(context, device_type="cpu", timeout_s=30.0) if asked.gloo else nullcontext():
        for stage in STAGES:
            beat(stage)
            (asked.mark / f"{stage}{context.rank}").touch()
            act(asked, context, stage)
            if asked.gloo:
                all_reduce(context)


def all_reduce(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == context.world_size


def print_ports(context: RankContext) -> None:
    """Print where the launcher and this rank listen, and who may use the file by which the ranks meet."""
    for process in (psutil.Process().parent(), psutil.Process()):
        assert process is not None
        listening = [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        print(sorted({each.laddr.ip for each in listening}))
    assert context.store is not None
    folder = context.store.parent.stat()
    print(f"{folder.st_mode & 0o777:o}", folder.st_uid == os.getuid(), context.store.stat().st_size > 0)


def act(asked: argparse.Namespace, context: RankContext, stage: str) -> None:
    if stage != asked.stage or asked.act == "none":
        return
    if asked.act == "hang":
        beat(stage, 0.1)  # the time of a step
    if asked.rank not in (context.rank, -1):
        if not asked.gloo and stage != "start":  # as a rank that waits for the others
            time.sleep(120)
        return
    while stage != "start" and not all((asked.mark / f"{stage}{rank}").exists() for rank in range(context.world_size)):
        time.sleep(0.01)
    match asked.act:
        case "ports":
            print_ports(context)
        case "kill":
            report_left(lambda: [f"left by rank {context.rank}"])
            (asked.mark / temporary_name()).touch()
            with locked_file(asked.mark / ".osora-1.lock"):
                os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("the sky is green\nand more")
        case "refuse":
            raise CheckpointError("weights.safetensors is truncated", hint="download it again")
        case "exit":
            print("no luck")
            os._exit(7)
        case "wait" | "fail to save" | "hang":
            time.sleep(120)
        case "ignore":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", str(asked.mark)])
            time.sleep(120)
        case "compute":
            compute(4)


def compute(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # while it reports something else
        sys.exit(INTERRUPTED)
