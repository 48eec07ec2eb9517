"""The latency-bandwidth model of communication, t = a + b * bytes (Hockney 1994)."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBandwidth:
    """A fitted line."""

    latency_s: float
    """a: what a collective takes however little it sends."""
    seconds_per_byte: float
    """b: of what one rank puts on the wire."""

    def seconds(self, num_bytes: float, *, collectives: float = 1) -> float:
        """Return the time of so many collectives in which a rank sends `num_bytes` altogether."""
        return self.latency_s * collectives + self.seconds_per_byte * num_bytes

    @property
    def bandwidth_gb_per_s(self) -> float | None:
        """1/b; None where time does not grow with bytes."""
        return 1e-9 / self.seconds_per_byte if self.seconds_per_byte > 0 else None


def fit_latency_bandwidth(num_bytes: Sequence[float], seconds: Sequence[float]) -> LatencyBandwidth:
    """Fit a and b by least squares of the relative errors, so that 8 bytes count as much as 1 GiB.

    Neither becomes negative: where that would fit best, it is 0 and the other is fitted alone.

    Args:
        num_bytes: bytes sent, at least one of them.
        seconds: times, over 0.
    """
    # With u = 1/t and v = bytes/t the relative error is a u + b v - 1.
    u = [1 / t for t in seconds]
    v = [size / t for size, t in zip(num_bytes, seconds, strict=True)]
    uu, uv, vv = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        latency = (sum(u) * vv - sum(v) * uv) / determinant
        per_byte = (sum(v) * uu - sum(u) * uv) / determinant
        if latency >= 0 and per_byte >= 0:
            return LatencyBandwidth(latency_s=latency, seconds_per_byte=per_byte)
        if per_byte >= 0:
            return LatencyBandwidth(latency_s=0.0, seconds_per_byte=sum(v) / vv)
    # One size alone, or times that fall with size: all of it is latency.
    return LatencyBandwidth(latency_s=sum(u) / uu, seconds_per_byte=0.0)
