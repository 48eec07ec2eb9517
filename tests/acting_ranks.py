"""Ranks of a real command, of which one does something else as soon as it is in a stage."""

from pathlib import Path

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
HANG = "time.sleep(300)"

# Python runs a module of this name when it starts.
_ACTING = """
import os, signal, time
from opensora_cli.core import ranks

left = {nth}

def beat(stage, *arguments, **named):
    global left
    real_beat(stage, *arguments, **named)
    left -= stage == "{stage}"
    if stage == "{stage}" and left == 0:
        {act}

number = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
if number == "{rank}":
    real_beat, ranks.beat = ranks.beat, beat
"""


def act_in_stage(folder: Path, *, rank: int, stage: str, act: str, nth: int = 1) -> None:
    """Write what ranks with `folder` first in their PYTHONPATH run.

    Args:
        act: Python, which `rank` runs once.
        nth: of its signs of life in `stage`: the first is sent when that begins.
    """
    folder.mkdir(exist_ok=True)
    text = _ACTING.format(rank=rank, stage=stage, act=act, nth=nth)
    (folder / "sitecustomize.py").write_text(text)
