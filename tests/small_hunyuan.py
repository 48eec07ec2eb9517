"""The video autoencoder in small."""

from opensora_cli.models.vae.config import HunyuanVAEConfig

SMALL_HUNYUAN = HunyuanVAEConfig(
    latent_channels=4,
    block_out_channels=(8, 8, 16),
    layers_per_block=1,
    norm_num_groups=4,
    sample_size=16,
    sample_tsize=16,
    time_compression_ratio=4,
    spatial_compression_ratio=4,
)
"""Tiles of 4 x 4 latents and 4 + 1 latent frames."""
