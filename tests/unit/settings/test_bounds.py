"""Bounds of the numbers in all settings: none may be so large that a plan never ends, or takes all memory."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import opensora_cli.settings
from opensora_cli.core.section import Section
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.generate_sections import MAX_SEED

for _module in pkgutil.iter_modules(opensora_cli.settings.__path__):
    importlib.import_module(f"opensora_cli.settings.{_module.name}")


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    for each in section.__subclasses__():
        if each.__module__.startswith("opensora_cli."):
            yield each
        yield from _sections(each)


def _numbers(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema of each number in a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield schema
        schema = [value for key, value in schema.items() if key != "default"]
    if isinstance(schema, list):
        for each in schema:
            yield from _numbers(each)


def _all_numbers() -> dict[str, list[dict[str, Any]]]:
    found = {}
    for section in set(_sections(Section)):
        schema = section.model_json_schema()
        # Other definitions are those of sections.
        tuples = {name: each for name, each in schema.get("$defs", {}).items() if each.get("type") == "array"}
        for name, field in {**schema["properties"], **tuples}.items():
            found[f"{section.__name__}.{name}"] = [*_numbers(field)]
    return found


def test_every_number_of_every_section_has_a_lower_and_an_upper_bound() -> None:
    found = {name: numbers for name, numbers in _all_numbers().items() if numbers}
    assert {"ModelSettings.mlp_ratio", "DataSettings.BucketSettings", "SamplingSettings.num_samples"} <= found.keys()
    assert len(found) > 200
    bounds = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})
    lacking = [name for name, numbers in found.items() if not all(each.keys() & b for each in numbers for b in bounds)]
    assert lacking == []


def test_every_setting_is_described() -> None:
    """A section in another one is described by its class, and figures of a data sheet by their names."""
    lacking = [
        f"{section.__name__}.{name}"
        for section in set(_sections(Section))
        for name, details in section.model_fields.items()
        if not details.description and not isinstance(details.default, Section)
    ]
    assert sorted(lacking) == ["GpuSettings.fp16_tflops", "GpuSettings.fp32_tflops"]


def test_bytes_seeds_and_factors_alone_may_be_over_a_billion() -> None:
    """A seed has the number of the sample added to it, and stays within 64 bits."""
    far = {name for name, numbers in _all_numbers().items() if any(each.get("maximum", 0) > 1e9 for each in numbers)}
    endings = ("seed", "bytes", "limit", "memory", "shard_size", "reserved", "buffer", "tol", "grad_norm")
    assert [name for name in sorted(far) if not name.endswith(endings)] == []
    assert MAX_SEED + 10_000 < 2**63


def test_an_mlp_has_a_width() -> None:
    sizes: dict[str, Any] = {"hidden_size": 12, "num_heads": 1, "axes_dim": (4, 4, 4)}
    assert ModelSettings(**sizes, mlp_ratio=1 / 12).mlp_ratio == 1 / 12
    with pytest.raises(
        ValidationError, match=r"model.mlp_ratio=0.01 must give the MLPs of model.hidden_size=12 a width"
    ):
        ModelSettings(**sizes, mlp_ratio=0.01)
