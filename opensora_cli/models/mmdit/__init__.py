"""The multimodal diffusion transformer."""

from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT

__all__ = ["MMDiT", "MMDiTConfig"]
