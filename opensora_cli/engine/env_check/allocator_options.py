"""The options of torch's CUDA allocator, as `PYTORCH_ALLOC_CONF` has them, and what is wrong with a text of them.

Options and rules are those of `c10/core/AllocatorConfig.h` and `c10/cuda/CUDAAllocatorConfig.h` in torch 2.13.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from opensora_cli.settings.explain import nearest

_NUMBER = re.compile(r"\d+")
_PAIR = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)")
_LARGE_SEGMENT_MB = 20
_BACKENDS = ("native", "cudaMallocAsync")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a text of options."""

    message: str
    why: str
    fix: str
    is_fatal: bool
    """Whether torch refuses the text, when it first uses a GPU."""


def find_faults(text: str) -> Iterator[Fault]:
    """Yield what is wrong with the options in `text`, as in `expandable_segments:True,max_split_size_mb:128`."""
    plain = re.sub(r"\s", "", text)  # torch skips white space, wherever it is
    if not plain:
        return
    options = dict(_PAIR.findall(plain))
    if ",".join(f"{name}:{value}" for name, value in _PAIR.findall(plain)) != plain.removesuffix(","):
        yield _misspelt(text, plain)
        return
    for name, value in options.items():
        yield from _judge(name, value)
    yield from _contradictions(options)


def _misspelt(text: str, plain: str) -> Fault:
    fixed = re.sub(r"[;,\s]+", ",", text.strip(" ,;'\"").replace("=", ":"))
    # Only a fix that is one: name:value pairs with commas between.
    fits = ",".join(f"{name}:{value}" for name, value in _PAIR.findall(fixed)) == fixed
    return Fault(
        f"{text!r} is not of the form name:value,name:value",
        "torch stops when it first uses a GPU, with an internal assertion that names no variable",
        f"write {fixed}" if fits and fixed != plain else "write it as in expandable_segments:True",
        is_fatal=True,
    )


def _judge(name: str, value: str) -> Iterator[Fault]:
    if name not in _RULES:
        close = nearest(name, _RULES)
        yield Fault(
            f"{name} is not an option",
            "torch knows none of this name, and stops when it first uses a GPU",
            f"did you mean {close}?" if close else f"drop it; there are {', '.join(sorted(_RULES))}",
            is_fatal=True,
        )
        return
    is_allowed, rule = _RULES[name]
    if not is_allowed(value):
        yield Fault(
            f"{name}:{value} must be {rule}",
            "torch stops when it first uses a GPU",
            f"write {name}:...",
            is_fatal=True,
        )


def _contradictions(options: Mapping[str, str]) -> Iterator[Fault]:
    if options.get("backend") == "cudaMallocAsync":
        ignored = sorted(options.keys() & _NATIVE_ONLY)
        if ignored:
            yield Fault(
                f"backend:cudaMallocAsync excludes {', '.join(ignored)}",
                "CUDA's allocator manages memory in its own way and ignores them",
                "drop them, or backend:cudaMallocAsync",
                is_fatal=False,
            )
    largest = options.get("large_segment_size_mb", str(_LARGE_SEGMENT_MB))
    for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        value = options.get(name, largest)
        if _NUMBER.fullmatch(largest) and _NUMBER.fullmatch(value) and int(value) < int(largest):
            yield Fault(
                f"{name}:{value} is less than a segment, large_segment_size_mb:{largest}",
                "torch stops when it first uses a GPU",
                f"use at least {largest}",
                is_fatal=True,
            )


def _is_flag(value: str) -> bool:
    return value in ("True", "False")


def _at_least(least: int) -> Callable[[str], bool]:
    return lambda value: bool(_NUMBER.fullmatch(value)) and int(value) >= least


def _between(low: float, high: float, *, closed: bool) -> Callable[[str], bool]:
    def is_allowed(value: str) -> bool:
        try:
            number = float(value)
        except ValueError:
            return False
        return low < number < high or (closed and number == high)

    return is_allowed


def _is_power(text: str, *, or_zero: bool = False) -> bool:
    number = int(text) if _NUMBER.fullmatch(text) else -1
    return (number > 0 and number & (number - 1) == 0) or (or_zero and number == 0)


def _are_divisions(value: str) -> bool:
    if not value.startswith("["):
        return _is_power(value)
    pairs = [pair.partition(":") for pair in value[1:-1].split(",")]
    return all((size == ">" or _is_power(size)) and _is_power(parts, or_zero=True) for size, _, parts in pairs)


_Rule = tuple[Callable[[str], bool], str]
_FLAG: _Rule = (_is_flag, "True or False, with a capital letter")
_RULES: Mapping[str, _Rule] = {
    "backend": (_BACKENDS.__contains__, " or ".join(_BACKENDS)),
    "expandable_segments": _FLAG,
    "garbage_collection_threshold": (_between(0, 1, closed=False), "a share between 0 and 1, as in 0.8"),
    "graph_capture_record_stream_reuse": _FLAG,
    "large_segment_size_mb": (_at_least(11), "a whole number over 10"),
    "max_non_split_rounding_mb": (_at_least(1), "a whole number"),
    "max_split_size_mb": (_at_least(1), "a whole number"),
    "per_process_memory_fraction": (_between(0, 1, closed=True), "a share of the GPU, as in 0.9"),
    "pinned_free_catch_all": _FLAG,
    "pinned_max_cached_size_mb": (_at_least(0), "a whole number"),
    "pinned_max_round_threshold_mb": (_at_least(0), "a whole number"),
    "pinned_num_register_threads": (
        lambda value: _is_power(value) and int(value) <= 128,
        "a power of 2 of at most 128",
    ),
    "pinned_reserve_segment_size_mb": (_at_least(1), "a whole number over 0"),
    "pinned_use_background_threads": _FLAG,
    "pinned_use_cuda_host_register": _FLAG,
    "release_lock_on_cudamalloc": _FLAG,
    "roundup_power2_divisions": (_are_divisions, "a power of 2, or a list as in [256:1,512:2,>:4]"),
    "throw_on_cudamalloc_oom": _FLAG,
}
_NATIVE_ONLY = frozenset(
    {
        "expandable_segments",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
    }
)
