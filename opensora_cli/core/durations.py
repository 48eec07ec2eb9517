"""Time spans for people."""


def duration(seconds: float) -> str:
    """Return a time span as people say it: `2.4 s`, `4 min 05 s`, `1 h 02 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
