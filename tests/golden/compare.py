"""Reading golden files, and the agreement that is asked of our numbers.

A golden file is a `.safetensors` file with tensors `param.*` (a state dict), `in.*` and `out.*`, and its configuration
as JSON under the metadata key `config`. Nothing in the tests may depend on which file it is, only on this form.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import closeness
import torch
from safetensors import safe_open

from opensora_cli.core.section import Section

SizesT = TypeVar("SizesT", bound=Section)

TOLERANCE = 2e-5
"""Largest absolute error, relative to the expected tensor's largest magnitude where that is over 1.

1e-4 would let a wrong epsilon or the wrong GELU through.
"""


@dataclass(frozen=True)
class GoldenFile:
    """One golden file, its tensors without their prefixes."""

    config: dict[str, Any]
    params: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]

    def sizes(self, kind: type[SizesT], *, of: str | None = None) -> SizesT:
        """Return a model's configuration; the reference's keys that only describe a file's layout are left out."""
        values = self.config if of is None else self.config[of]
        known = set(kind.model_fields)
        assert set(values) <= known | {"fused_qkv", "use_liger_rope"}
        return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in known})


def read_golden_file(path: Path) -> GoldenFile:
    """Read a golden file. Raises ValueError for a tensor that has none of the three prefixes."""
    groups: dict[str, dict[str, torch.Tensor]] = {"param": {}, "in": {}, "out": {}}
    with safe_open(path, framework="pt") as file:
        config = json.loads((file.metadata() or {}).get("config", "{}"))
        for key in file.keys():  # noqa: SIM118 - a safetensors file is not a mapping
            prefix, _, name = key.partition(".")
            if prefix not in groups or not name:
                raise ValueError(f"{path}: tensor {key!r} is none of param.*, in.* and out.*")
            groups[prefix][name] = file.get_tensor(key)
    return GoldenFile(config, groups["param"], groups["in"], groups["out"])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, what: str = "output") -> None:
    """Fail unless `actual` has the shape of `expected` and agrees with it to `TOLERANCE`; a NaN never agrees."""
    closeness.assert_close(actual, expected, tolerance=TOLERANCE, floor=1.0, what=what)
