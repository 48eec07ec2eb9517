"""`launch` as a command line calls it, in a process that a test can interrupt or kill.

`launch_driver.py JSON ARGUMENTS...`: JSON holds the request; ARGUMENTS are those of `launch_rank.py`.
"""

import json
import signal
import sys
from pathlib import Path

from opensora_cli.cli import errors
from opensora_cli.engine.launch.launcher import LaunchRequest, Pace, launch


def main() -> None:
    fields = json.loads(sys.argv[1])
    request = LaunchRequest(device_type="cpu", **{**fields, "log_dir": Path(fields["log_dir"])})
    command = (sys.executable, str(Path(__file__).parent / "launch_rank.py"))
    pace = Pace(look_s=0.05, frozen_s=5.0, settle_s=1.0, interrupt_s=2.0, terminate_s=0.5)
    with errors.interruptible():
        launch(request, sys.argv[2:], command=command, pace=pace)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    sys.exit(errors.run(main))
