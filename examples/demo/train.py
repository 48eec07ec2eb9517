"""Train a part of the demo: python examples/demo/train.py --recipe demo_short."""

import sys

from demo_world.command import run

if __name__ == "__main__":
    sys.exit(run())
