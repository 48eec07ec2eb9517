"""The table of names in the documentation is that of the package."""

import importlib
import inspect
import pkgutil
import re

from docs.pages import ROOT

import opensora_cli.community

PAGE = (ROOT / "docs" / "reference" / "community.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]
MODULES = [
    f"opensora_cli.community.{found.name}"
    for found in pkgutil.iter_modules(opensora_cli.community.__path__)
    if not found.name.startswith("_")
]
NOT_HERE = "not here"


def public_names(module: str) -> set[str]:
    """Return what a module defines or hands on under its own name, without what it is built from."""
    loaded = importlib.import_module(module)
    source = inspect.getsource(loaded)
    handed_on = set(re.findall(r" import \w+ as (\w+)$", source, re.MULTILINE))
    aliases = {name for name in handed_on if not re.search(rf" import {name} as {name}$", source, re.MULTILINE)}
    defined = set(re.findall(r"^(?:class|def) ([A-Za-z]\w*)", source, re.MULTILINE))
    assigned = set(re.findall(r"^([A-Za-z]\w*) = ", source, re.MULTILINE))
    return (handed_on - aliases) | defined | assigned


def test_no_cell_is_empty() -> None:
    assert len(ROWS) > 60
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []


def test_every_name_is_where_the_table_says() -> None:
    for names, place, _ in ROWS:
        module = None if place == NOT_HERE else importlib.import_module(place.strip("`"))
        for name in re.findall(r"`(\w+)`", names):
            there = [each for each in MODULES if hasattr(importlib.import_module(each), name)]
            assert module is None or hasattr(module, name), name
            assert module is not None or not there, f"{name} is in {there}"


def test_every_public_name_is_in_the_table() -> None:
    assert len(MODULES) == 6
    for module in MODULES:
        named = {name for names, place, _ in ROWS if place == f"`{module}`" for name in re.findall(r"`(\w+)`", names)}
        assert named - {"_gather", "_split"} == public_names(module)
