"""Command line of the demo's training. Wrong requests are refused before torch is imported."""

import argparse
import sys
from collections.abc import Sequence

from demo_world.settings import TextRecipe, list_recipes, load_recipe
from opensora_cli.cli import errors
from opensora_cli.core.progress import ConsoleReporter


def run(arguments: Sequence[str] | None = None) -> int:
    """Train what the command line names, print the exported files, and return the exit code."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train a part of the demo on procedural scenes.")
    parser.add_argument("--recipe", required=True, help=f"{', '.join(list_recipes())}, or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in loop.steps=400")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace the earlier run in the output folder")
    options = parser.parse_args(arguments)
    reporter = ConsoleReporter(has_bars=sys.stderr.isatty())

    def command() -> None:
        recipe = load_recipe(options.recipe, options.set)
        with errors.interruptible():
            from demo_world.training import train_on_scenes, train_text_encoders

            if isinstance(recipe, TextRecipe):
                exports = train_text_encoders(recipe, overwrite=options.overwrite, reporter=reporter)
            else:
                exports = train_on_scenes(recipe, resume=options.resume, overwrite=options.overwrite, reporter=reporter)
        print("\n".join(map(str, exports)))

    return errors.run(command)
