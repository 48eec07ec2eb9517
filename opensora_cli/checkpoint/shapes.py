"""The names and shapes of tensors, compared with those that a model has."""

from collections.abc import Mapping

from opensora_cli.core.listing import first_few

Shape = tuple[int, ...]


def differences(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> list[str]:
    """Return what is wrong with tensors that should have the names and shapes `expected`, each kind in one line."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    wrong = [
        f"{key}: file {list(shape)}, model {list(expected[key])}"
        for key, shape in found.items()
        if key in expected and shape != expected[key]
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
    return [f"{len(names)} {kind} ({first_few(names)})" for kind, names in kinds if names]
