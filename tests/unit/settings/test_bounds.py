"""Bounds of the numbers in all settings: none may be so large that a plan never ends, or takes all memory."""

import importlib
import pkgutil
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
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


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield constraints, those that pydantic has put together one by one."""
    for each in metadata:
        if isinstance(each, annotated_types.GroupedMetadata):
            yield from each
        else:
            yield each
            yield from getattr(each, "metadata", ())


def _numbers(annotation: Any, metadata: Sequence[Any]) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the lower and the upper bounds of each kind of number that an annotation has in it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *own = get_args(annotation)
        yield from _numbers(inner, [*metadata, *_flat(own)])
    elif origin in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _numbers(each, metadata)
    elif origin is not None and origin is not Literal:
        for each in get_args(annotation):
            yield from _numbers(each, ())
    elif annotation in (int, float):
        low = [getattr(each, "ge", getattr(each, "gt", None)) for each in metadata]
        high = [getattr(each, "le", getattr(each, "lt", None)) for each in metadata]
        yield [each for each in low if each is not None], [each for each in high if each is not None]


def _all_numbers() -> dict[str, list[tuple[list[float], list[float]]]]:
    found = {}
    for section in set(_sections(Section)):
        for name, details in section.model_fields.items():
            numbers = list(_numbers(details.annotation, list(_flat(details.metadata))))
            if numbers:
                found[f"{section.__name__}.{name}"] = numbers
    return found


def test_every_number_of_every_section_has_a_lower_and_an_upper_bound() -> None:
    found = _all_numbers()
    assert {"ModelSettings.mlp_ratio", "VAESettings.block_out_channels", "SamplingSettings.num_samples"} <= found.keys()
    assert len(found) > 200
    lacking = [name for name, numbers in found.items() if not all(low and high for low, high in numbers)]
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
    far = {name for name, numbers in _all_numbers().items() if any(min(high) > 1e9 for _, high in numbers)}
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
