"""The names of released models, as they are asked for."""

from opensora_cli.checkpoint.released import released_names
from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.explain import nearest


def require_preset(name: str) -> None:
    """Check that there is a released model of this name.

    Raises:
        RequestError: there is none; the nearest is named.
    """
    names = released_names()
    if name not in names:
        close = nearest(name, names)
        raise RequestError(
            f"preset={name} is not one of {', '.join(names)}", hint=f"did you mean {close}?" if close else None
        )
