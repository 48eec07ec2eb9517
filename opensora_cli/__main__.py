"""`python -m opensora_cli`, the same as `osora`; torchrun starts workers this way."""

import sys

from opensora_cli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
