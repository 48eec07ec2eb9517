"""The autoencoders in small. Tiles have 4 x 4 latents and 4 latent frames, of a causal one 4 + 1."""

from opensora_cli.models.vae.config import DCAEConfig, FluxAEConfig, HunyuanVAEConfig

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
SMALL_DC_AE = DCAEConfig(
    latent_channels=8,
    block_types=("res", "efficientvit", "efficientvit"),
    width_list=(8, 32, 32),
    encoder_depth_list=(1, 1, 1),
    decoder_depth_list=(1, 1, 1),
    temporal=(True, True, False),
    spatial_tile_size=16,
    temporal_tile_size=16,
)
SMALL_FLUX_AE = FluxAEConfig(ch=32, ch_mult=(1, 2, 1), num_res_blocks=1, z_channels=4, tile_size=16)
