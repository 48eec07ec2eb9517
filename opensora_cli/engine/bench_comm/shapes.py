"""Shapes of the largest exchanges of osora: tokens for heads (Ulysses attention), and the weights of a block."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from opensora_cli.engine.bench_comm.operations import Operation, Place, all_gather, fill
from opensora_cli.engine.components.configs import mmdit_config, with_depth
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.collectives import all_to_all
from opensora_cli.parallel.shares import shares, span
from opensora_cli.sampling.schedule import latent_size
from opensora_cli.sampling.sizes import image_size
from opensora_cli.settings.enums import Collective
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset

DTYPE = torch.bfloat16
"""Dtype of the model on GPUs."""

_QKV = 3
"""Tensors that Ulysses attention exchanges at once."""
_PRESETS = {Collective.ULYSSES_256PX: "256px", Collective.ULYSSES_768PX: "768px"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """Sizes of a model that decide how much is sent."""

    tokens: Mapping[Collective, int]
    """Text and video, of one sample, for each Ulysses exchange."""
    num_heads: int
    head_dim: int
    block_parameters: int
    """Parameters of the larger kind of block."""

    def size_bytes(self, collective: Collective, ranks: int) -> int:
        """Return the size of the largest rank's buffer, by the convention of nccl-tests."""
        if collective is Collective.BLOCK_GATHER:
            return -(-self.block_parameters // ranks) * ranks * DTYPE.itemsize
        return shares(self.tokens[collective], ranks)[0] * self.num_heads * self.head_dim * _QKV * DTYPE.itemsize

    def build(self, collective: Collective, place: Place) -> Operation:
        """Return a collective in its one shape."""
        if collective is Collective.BLOCK_GATHER:
            return all_gather(place, self.size_bytes(collective, place.ranks), DTYPE)
        return ulysses(place, tokens=self.tokens[collective], num_heads=self.num_heads, head_dim=self.head_dim)


@cache
def released_shapes() -> ModelShapes:
    """Return the shapes of the released model, as its presets sample: no weights are needed."""
    tokens = {}
    for collective, preset in _PRESETS.items():
        settings = load_preset(preset, prompt="any")
        tokens[collective] = _video_tokens(settings) + settings.text.t5_max_length
        config = mmdit_config(settings.model)
    with torch.device("meta"):
        model = MMDiT(with_depth(config, 1))
    blocks = (model.double_blocks[0], model.single_blocks[0])
    return ModelShapes(
        tokens=tokens,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        block_parameters=max(sum(weight.numel() for weight in block.parameters()) for block in blocks),
    )


def _video_tokens(settings: GenerateSettings) -> int:
    video, patch_size = settings.video, settings.model.patch_size
    height, width = image_size(video.resolution, video.aspect_ratio, multiple=settings.size_multiple)
    rows, columns = latent_size(
        height, width, spatial_compression=settings.vae.spatial_compression_ratio, patch_size=patch_size
    )
    return settings.num_latent_frames * rows * columns // patch_size**2


def ulysses(place: Place, *, tokens: int, num_heads: int, head_dim: int) -> Operation:
    """Exchange tokens for heads, as before the attention of one block: q, k and v of one sample at once.

    `tokens` are those of the whole sequence; shares may be uneven, and so may those of heads.
    """
    rank, ranks = place.rank, place.ranks
    lengths, heads = shares(tokens, ranks), shares(num_heads, ranks)
    width = _QKV * head_dim
    own_BHND = place.empty(num_heads * lengths[rank] * width, DTYPE).view(1, num_heads, lengths[rank], width)

    def run() -> torch.Tensor:
        return all_to_all(own_BHND, place.group, 1, 2, scatter_sizes=heads, gather_sizes=lengths)

    def count_wrong() -> int:
        fill(own_BHND, scale=rank + 1)
        received = run()
        wrong = 0
        for source, part in enumerate(torch.split(received, list(lengths), dim=2)):
            sent = own_BHND.new_empty(1, num_heads, lengths[source], width)
            fill(sent, scale=source + 1)
            wrong += int((part != sent[:, span(heads, rank)]).sum())
        return wrong

    size_bytes = num_heads * lengths[0] * width * DTYPE.itemsize
    return Operation(size_bytes, DTYPE, run, count_wrong)
