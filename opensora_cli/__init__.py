"""osora: run, train, measure and convert Open-Sora 2.0 on today's PyTorch."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["Pipeline", "Video", "__version__", "generate"]

if TYPE_CHECKING:
    from opensora_cli.api import Pipeline, Video, generate
else:

    def __getattr__(name: str) -> object:
        # Only where it is asked for: torch takes seconds to import.
        if name not in ("Pipeline", "Video", "generate"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("opensora_cli.api"), name)
