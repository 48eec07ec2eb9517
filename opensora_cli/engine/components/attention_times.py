"""How long backends of attention take on the shapes of a run, and what earlier runs have found.

Attention is linear in the number of queries: of long sequences some queries stand for all, with all keys.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from opensora_cli.core.attention import AttentionBackend
from opensora_cli.core.attention_kinds import ATTENTION_KINDS
from opensora_cli.core.exceptions import FileProblem, OutputError
from opensora_cli.core.files import user_cache, write_json_atomic
from opensora_cli.core.reading import read_json_object
from opensora_cli.engine.components.hardware import release_memory
from opensora_cli.models.attention import attention_backend

SCHEMA = "osora.attention/1"
_QUERIES = 2048
"""They keep a GPU busy: with 24 heads, in 384 tiles of 128."""
_COMPARED_QUERIES = 64
_REPEATS = 3
_TOLERANCES = {torch.float16: 0.01, torch.bfloat16: 0.05}
"""Of the norm of the difference from `math` over that of the result: a few roundings of the dtype."""
_TOLERANCE = 0.005
"""Of float32, whose products may be in TF32."""

Clock = Callable[[], float]
"""Seconds."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one device computes at a time, of one sample."""

    heads: int
    queries: int
    keys: int
    head_dim: int
    in_parts: bool = False
    """As ring attention computes it, of which `keys` are a part."""

    def __str__(self) -> str:
        parts = " of a ring" if self.in_parts else ""
        return f"{self.heads} heads of {self.head_dim}, {self.queries:,} x {self.keys:,} tokens{parts}"


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """What backends took."""

    milliseconds: Mapping[str, float]
    """By their names, the fastest first; for the queries that were timed."""

    @property
    def fastest(self) -> str:
        """The name of the fastest."""
        return min(self.milliseconds, key=lambda name: self.milliseconds[name])

    def line(self) -> str:
        """Return it for people."""
        return ", ".join(f"{name} {value:.3g} ms" for name, value in self.milliseconds.items())


class RememberedTimes:
    """A file of the user's cache: the times for one shape and dtype on one device, with the versions that are here."""

    def __init__(self, shape: AttentionShape, *, device: torch.device, dtype: torch.dtype) -> None:
        is_cuda = device.type == "cuda"
        libraries = [kind.library for kind in ATTENTION_KINDS.values() if kind.library is not None]
        self._asked = {
            **asdict(shape),
            "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
            "dtype": str(dtype),
            "torch": torch.__version__,
            "libraries": {library.distribution: library.version() for library in libraries},
        }
        digest = hashlib.sha256(json.dumps(self._asked, sort_keys=True).encode()).hexdigest()
        folder = user_cache("attention")
        self.path: Path | None = folder and folder / f"{digest[:32]}.json"

    def read(self, note: Callable[[str], None] = lambda text: None) -> AttentionTimes | None:
        """Return the times; None where there are none. A file that holds none is ignored, with a note."""
        if self.path is None or not self.path.exists():
            return None
        try:
            return AttentionTimes(self._times(read_json_object(self.path)))
        except (FileProblem, ValueError) as error:
            note(f"attention: {self.path} is ignored: {error}")
            return None

    def _times(self, document: Mapping[str, object]) -> dict[str, float]:
        times = document.get("milliseconds")
        if document.get("schema") != SCHEMA or document.get("asked") != self._asked:
            raise ValueError("it is not about this device, shape and versions")
        if not isinstance(times, dict) or not times or not all(map(_is_time, times.values())):
            raise ValueError("it holds no times")
        if unknown := sorted(times.keys() - ATTENTION_KINDS.keys()):
            raise ValueError(f"{unknown[0]} is not a backend")
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def write(self, times: AttentionTimes) -> None:
        """Keep the times, if the cache can be written."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            document = {"schema": SCHEMA, "asked": self._asked, "milliseconds": dict(times.milliseconds)}
            write_json_atomic(self.path, document)
        except (OSError, OutputError):
            return


def _is_time(value: object) -> bool:
    return isinstance(value, float) and isfinite(value) and value > 0


@torch.inference_mode()
def time_attention(
    names: Sequence[str],
    shape: AttentionShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock = time.perf_counter,
) -> tuple[AttentionTimes, list[str]]:
    """Return the times of the backends that agree with `math` on a shape, and what is wrong with the others, a line
    each.

    The times are the shortest of some; there may be none. It takes the memory of the keys and values of one layer.
    """
    problems, found = [], dict[str, float]()
    try:
        q_BHND, k_BHMD, v_BHMD = _random(shape, device, dtype)
        few_B1ND = q_BHND[:, :1, :_COMPARED_QUERIES]
        expected = attention_backend("math")(few_B1ND, k_BHMD[:, :1], v_BHMD[:, :1])
        for name in names:
            attend = partial(_attend, attention_backend(name), q_BHND, k_BHMD, v_BHMD, in_parts=shape.in_parts)
            try:
                # The first call loads or tunes kernels.
                difference = _difference(attend()[:, :1, : expected.shape[2]], expected)
                if not difference <= _TOLERANCES.get(dtype, _TOLERANCE):
                    problems.append(f"{name} differs from math by {difference:.1%}")
                    continue
                found[name] = 1e3 * min(_seconds(attend, device, clock) for _ in range(_REPEATS))
            except Exception as error:
                # Libraries raise anything where their kernels do not fit.
                problems.append(f"{name}: {' '.join(str(error).split())[:200] or type(error).__name__}")
    except (RuntimeError, MemoryError) as error:
        problems.append(" ".join(str(error).split())[:200])
    release_memory(device)
    return AttentionTimes(dict(sorted(found.items(), key=lambda item: item[1]))), problems


def _random(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return q_BHND of some queries, k_BHMD and v_BHMD, with tokens before heads in memory, as projections have it."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = min(shape.queries, _QUERIES), shape.keys, shape.keys
    sizes = [(1, length, shape.heads, shape.head_dim) for length in lengths]
    return [torch.randn(size, generator=generator, device=device, dtype=dtype).transpose(1, 2) for size in sizes]


def _attend(attention: AttentionBackend, q: Tensor, k: Tensor, v: Tensor, *, in_parts: bool) -> Tensor:
    if not in_parts:
        return attention(q, k, v)
    assert attention.part_kernel is not None, "backends without it are no candidates"
    return attention.part_kernel(q, k, v).attend(q, k, v)[0]


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _seconds(attend: Callable[[], Tensor], device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    attend()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start
