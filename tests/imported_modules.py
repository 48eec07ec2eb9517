"""What a process of `osora` imports."""

import subprocess
import sys

_CODE = """
import sys
from opensora_cli.cli.app import main
for request in sys.argv[1:]:
    main(request.split())
print("\\n", *sorted(sys.modules))
"""


def modules_after(*requests: str) -> set[str]:
    """Return the modules that a fresh process has imported after some command lines of `osora`, good or refused."""
    done = subprocess.run([sys.executable, "-c", _CODE, *requests], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())
