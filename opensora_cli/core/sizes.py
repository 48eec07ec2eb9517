"""Numbers of bytes as people write and read them."""

import re

UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Decimal, as disks and downloads are sold; names to bytes, smallest first."""

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_LARGEST = 2**63 - 1
"""No file is larger, on any system."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means: `4096`, `4GB` (powers of 1000), `4GiB` (powers of 1024), `1.5 GB`.

    Raises:
        ValueError: it is no size, or one that no file can have.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(found.group(2).upper()) if found else None
    if found is None or factor is None:
        raise ValueError(f"{text!r} is not a size such as 4GB or 4096MiB")
    size = float(found.group(1)) * factor
    if size > _LARGEST:
        raise ValueError(f"{text.strip()[:20]!r}... is larger than any file")
    return round(size)


def best_unit(count: int) -> str:
    """Return the largest unit of which `count` bytes are at least one."""
    return max((unit for unit in UNITS if UNITS[unit] <= count), key=UNITS.__getitem__, default="bytes")


def format_bytes(count: int, *, unit: str | None = None) -> str:
    """Return `count` bytes for people: `23.8 GB`.

    Args:
        count: bytes.
        unit: one of `UNITS`; None: what suits the number.
    """
    unit = unit or best_unit(count)
    return f"{count} bytes" if unit == "bytes" else f"{count / UNITS[unit]:.1f} {unit}"
