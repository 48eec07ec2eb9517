"""Conversion between the autoencoder's latents (B,C,T,H,W) and the transformer's tokens (B,N,D)."""

import torch
from einops import rearrange


def pack_latents(latents_BCTHW: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Return latents as one token for each patch, (B,N,C·patch²); time is never patched.

    `patch_size` is in latent positions per token. Raises ValueError if it does not divide height and width.
    """
    height, width = latents_BCTHW.shape[3:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"latents of {height}x{width} do not divide into patches of {patch_size}x{patch_size}")
    return rearrange(latents_BCTHW, "b c t (h ph) (w pw) -> b (t h w) (c ph pw)", ph=patch_size, pw=patch_size)


def unpack_latents(
    packed_latents_BND: torch.Tensor, *, num_latent_frames: int, height: int, width: int, patch_size: int
) -> torch.Tensor:
    """Undo `pack_latents`: return latents_BCTHW of `height` x `width`. Raises ValueError if tokens do not match."""
    num_tokens = packed_latents_BND.shape[1]
    rows, columns = height // patch_size, width // patch_size
    if num_tokens != num_latent_frames * rows * columns or height % patch_size or width % patch_size:
        raise ValueError(
            f"{num_tokens} tokens are not {num_latent_frames} frames of {height}x{width} in patches of {patch_size}"
        )
    return rearrange(
        packed_latents_BND,
        "b (t h w) (c ph pw) -> b c t (h ph) (w pw)",
        t=num_latent_frames,
        h=rows,
        w=columns,
        ph=patch_size,
        pw=patch_size,
    )


def pack_conditioning(
    conditioning_mask_B1THW: torch.Tensor, reference_latents_BCTHW: torch.Tensor, patch_size: int
) -> torch.Tensor:
    """Return the transformer's conditioning_BNK: the mask and then the reference latents, packed in one tensor.

    K is (1 + C)·patch². Zeros everywhere mean that nothing is given.
    """
    return pack_latents(torch.cat([conditioning_mask_B1THW, reference_latents_BCTHW], dim=1), patch_size)


def position_ids(
    batch_size: int, num_latent_frames: int, rows: int, columns: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return position_ids_BN3, the (frame, row, column) of every token in the order of `pack_latents`, in fp32."""
    axes = [torch.arange(size, dtype=torch.float32, device=device) for size in (num_latent_frames, rows, columns)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return grid.reshape(1, -1, 3).expand(batch_size, -1, -1)
