"""Make the pictures of the README and of the documentation's first page again, with the demo model.

    python benchmarks/readme_pictures.py
    python benchmarks/readme_pictures.py --only red-boat --seed 3

Each picture's description on the page is the prompt.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / ".readme"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
_SHOWN = (
    re.compile(r'<img src="\.readme/(?P<name>[\w-]+)\.gif"[^>]* alt="(?P<prompt>[^"]+)"'),
    re.compile(r"!\[(?P<prompt>[^\]]+)\]\(pictures/(?P<name>[\w-]+)\.gif\)"),
)


def shown_prompts(pages: Sequence[Path] = PAGES) -> dict[str, str]:
    """Return the prompt of each picture that the pages show, by its name.

    Raises:
        ValueError: two pages describe a picture differently.
    """
    prompts: dict[str, str] = {}
    for text in (page.read_text(encoding="utf-8") for page in pages):
        for match in (match for form in _SHOWN for match in form.finditer(text)):
            name, prompt = match["name"], match["prompt"]
            if prompts.setdefault(name, prompt) != prompt:
                raise ValueError(f"{name}.gif is described as {prompts[name]!r} and as {prompt!r}")
    return prompts


def command(name: str, prompt: str, *, seed: int) -> list[str]:
    """Return the command that makes a picture."""
    out = str(PICTURES / f"{name}.gif")
    return [
        *(sys.executable, "-m", "opensora_cli", "generate", prompt, "--model", "demo", "--device", "cpu"),
        *("--seed", str(seed), "--out", out, "--overwrite", "--quiet"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the requested pictures, and return the exit code."""
    prompts = shown_prompts()
    parser = argparse.ArgumentParser(
        prog="readme_pictures.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(prompts), action="append", help="make only this; may be repeated")
    parser.add_argument("--seed", type=int, default=42, help="of the noise (%(default)s)")
    options = parser.parse_args(arguments)
    for name in options.only or prompts:
        print(f"{name}.gif: {prompts[name]}", flush=True)
        if code := subprocess.run(command(name, prompts[name], seed=options.seed), cwd=ROOT, check=False).returncode:
            return code
        # The page says how the picture was made, so it needs no sidecar.
        (PICTURES / f"{name}.gif.json").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
