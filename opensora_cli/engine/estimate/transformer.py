"""Memory and work of the transformer on one of several ranks, which shares tokens, heads or features with others."""

from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from opensora_cli.core.attention import AttentionBackend, AttentionFn
from opensora_cli.core.choices import LinearProducts, Solver
from opensora_cli.core.conditions import ConditionMode, ReferenceLengths
from opensora_cli.core.device import accumulation_dtype
from opensora_cli.core.device_names import GPU
from opensora_cli.engine.components.architectures import with_depth
from opensora_cli.engine.components.attention import attention_stand_in
from opensora_cli.engine.components.loras import LoraRanks, add_fake_loras, in_first_block
from opensora_cli.engine.components.parallelize import largest_share
from opensora_cli.engine.components.velocity import GuidedVelocity, PromptEmbeds, modulation_values
from opensora_cli.engine.estimate.fake_tensors import (
    Need,
    Work,
    WorkCounter,
    fake_device,
    fake_module,
    repeat_calls,
)
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.attention.torch_kernels import MATH_PARTS, sdpa
from opensora_cli.models.linears import Split
from opensora_cli.models.mmdit.blocks import SEQUENCE_INPUTS, TEXT_SEQUENCE_INPUTS, repeated_blocks
from opensora_cli.models.mmdit.config import MMDiTConfig
from opensora_cli.models.mmdit.model import MMDiT
from opensora_cli.parallel.shares import MeshShape, shares
from opensora_cli.sampling.conditioning import prepare_inference_condition
from opensora_cli.sampling.denoise import VelocityFn, denoise
from opensora_cli.sampling.guidance import Branch, GuidanceScales, branches_needed
from opensora_cli.sampling.packing import pack_conditioning, pack_latents, position_ids, unpack_latents
from opensora_cli.sampling.step_cache import CachedStep

_STEPS = 2
"""Steps to estimate: the second and later steps hold latents besides the noise."""

_ALONE = MeshShape()


@lru_cache(maxsize=256)
def sampling_need(
    config: MMDiTConfig,
    *,
    latent_shape: tuple[int, int, int, int],
    text_length: int,
    mode: ConditionMode,
    lengths: ReferenceLengths,
    causal: bool,
    scales: GuidanceScales,
    solver: Solver,
    cached: tuple[GuidanceScales, ...],
    num_times: int,
    chunk_tokens: int | None,
    linear: LinearProducts,
    loras: LoraRanks,
    attention: str,
    mesh: MeshShape,
    dtype: torch.dtype,
    device_type: str,
) -> Need:
    """Return the need of sampling one clip.

    Args:
        latent_shape: (C, T, H, W) of the sample.
        causal: whether the autoencoder encodes the first frame on its own.
        scales: guidance scales of a step with the most branches.
        cached: guidance scales of one step of each phase, with a step cache.
        num_times: times whose modulation is computed before the first step; 0 if each step computes its own.
        attention: attention backend.
    """
    channels, frames, rows, columns = latent_shape
    patch = config.patch_size
    with fake_device(device_type) as device:
        empty = partial(torch.empty, dtype=dtype, device=device)
        transformer = fake_transformer(
            config,
            device=device,
            dtype=dtype,
            mesh=mesh,
            linear=linear,
            attention=attention,
            loras=loras,
        )
        transformer.set_sequence_chunk(chunk_tokens)
        # Blocks run one after the other, so that one of each kind represents all.
        for block in (*transformer.double_blocks, *transformer.single_blocks):
            repeat_calls(block)
        steps = [*cached, *_STEPS * [scales]]
        count = max(len(steps) + 1, num_times)
        times = [1.0 - index / count for index in range(count)]
        with TensorBytes(device_type=device.type) as counter:
            embeds = PromptEmbeds(empty(2, text_length, config.context_in_dim), empty(2, config.vec_in_dim))
            references = [empty(channels, frames, rows, columns)] * 2 if mode.needs_reference else None
            # The same steps as in `sample_latents` of generation.
            noise_BCTHW = empty(1, channels, frames, rows, columns)
            mask_B1THW, given_BCTHW = prepare_inference_condition(
                noise_BCTHW, mode, [references], causal, lengths=lengths
            )
            velocity = GuidedVelocity(
                transformer if mesh.ring * mesh.ulysses == 1 else FakeSequenceParallel(transformer, mesh),
                embeds,
                conditioning_BNK=pack_conditioning(mask_B1THW, given_BCTHW, patch) if config.cond_embed else None,
                position_ids_1N3=position_ids(1, frames, rows // patch, columns // patch, device=device),
                embedded_guidance=1.0 if config.guidance_embed else None,
                times=times if num_times else (),
            )
            packed_BND = pack_latents(noise_BCTHW, patch)
            denoised_BND = denoise(
                _share_of_branches(velocity, mesh.guidance),
                packed_BND,
                timesteps=times[: len(steps) + 1],
                scales=steps,
                solver=solver,
                cache=[CachedStep(branches_needed(each), is_reused=False) for each in steps] if cached else None,
            )
            latents_BCTHW = unpack_latents(
                denoised_BND, num_latent_frames=frames, height=rows, width=columns, patch_size=patch
            )
            need = Need.of(counter)
            del latents_BCTHW
    # Modulation was computed for one block of each kind.
    all_blocks, one_block = (modulation_values(num_times, each) for each in (config, with_depth(config, 1)))
    return need._replace(data=need.data + (all_blocks - one_block) * dtype.itemsize)


@lru_cache(maxsize=64)
def evaluation_work(
    config: MMDiTConfig,
    video_tokens: int,
    text_tokens: int,
    dtype: torch.dtype,
    mesh: MeshShape = _ALONE,
    linear: LinearProducts = LinearProducts.EXACT,
) -> Work:
    """Return the work of one evaluation of the transformer for one clip, on the rank with the largest share. `linear`
    is the kind of products in its linear layers."""
    counter = WorkCounter()
    with fake_device(GPU) as device:
        empty = partial(torch.empty, dtype=dtype, device=device)
        transformer = fake_transformer(config, device=device, dtype=dtype, mesh=mesh, linear=linear)
        for stack in repeated_blocks(config):
            for block in transformer.get_submodule(stack.module_path).children():
                repeat_calls(block, work=counter)
                transformer.set_submodule(stack.module_path, nn.ModuleList([block] * stack.count))
        with counter:
            FakeSequenceParallel(transformer, mesh)(
                empty(1, video_tokens, config.in_channels),
                position_ids_BN3=torch.empty(1, video_tokens, 3, device=device),
                timesteps_B=torch.empty(1, device=device),
                prompt_embeds_BLC=empty(1, text_tokens, config.context_in_dim),
                pooled_prompt_embeds_BV=empty(1, config.vec_in_dim),
                conditioning_BNK=empty(1, video_tokens, config.conditioning_channels) if config.cond_embed else None,
                embedded_guidance_B=torch.empty(1, device=device) if config.guidance_embed else None,
            )
    return counter.work


def fake_transformer(
    config: MMDiTConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mesh: MeshShape,
    linear: LinearProducts,
    attention: str = "sdpa",
    loras: LoraRanks = (),
) -> MMDiT:
    """Return a transformer with fake weights that allocates like the one of a rank. Call it inside `fake_device`.

    `attention` names the backend. The first block of a stack represents all of them: it gets the largest adapters.
    """

    def make() -> MMDiT:
        attend = fake_attention(mesh, attention_stand_in(attention))
        transformer = MMDiT(with_depth(config, 1), attention=attend)
        keep_largest_share(transformer, mesh.tensor)
        add_fake_loras(transformer, largest_ranks(loras).items())
        return transformer

    transformer = fake_module(make, device=device, dtype=dtype)
    if linear is not LinearProducts.EXACT:
        from opensora_cli.engine.components.linear_products import use_in_block

        for stack in repeated_blocks(transformer.config):
            for block in transformer.get_submodule(stack.module_path).children():
                use_in_block(block, stack, linear)
    return transformer


def largest_ranks(loras: LoraRanks) -> dict[str, int]:
    """Return the rank of the adapters of each layer outside the blocks, and in one block for all of its stack."""
    ranks: dict[str, int] = {}
    for path, rank in loras:
        first = in_first_block(path)
        ranks[first] = max(ranks.get(first, 0), rank)
    return ranks


def keep_largest_share(transformer: MMDiT, ranks: int) -> None:
    """Reduce the blocks of a transformer without weights to the share of the rank with the largest one."""
    for stack in repeated_blocks(transformer.config) if ranks > 1 else ():
        for block in transformer.get_submodule(stack.module_path).children():
            for linear in stack.linears:
                whole = block.get_submodule(linear.path)
                assert isinstance(whole, nn.Linear)
                features, has_bias = round(sum(linear.pieces) * largest_share(linear, ranks)), whole.bias is not None
                if linear.split is Split.COLUMN:
                    share = nn.Linear(whole.in_features, features, has_bias)
                else:
                    share = _FakeRowLinear(features, whole.out_features, has_bias)
                block.set_submodule(linear.path, share)


class _FakeRowLinear(nn.Linear):
    """Stand-in that allocates like `RowLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight).clone()
        return out if self.bias is None else out + self.bias


def _share_of_branches(velocity: VelocityFn, ranks: int) -> VelocityFn:
    """Return a velocity that allocates like `SharedBranches` on the rank with the most branches."""
    if ranks == 1:
        return velocity

    def shared(
        packed_latents_1ND: Tensor, t: float, branches: tuple[Branch, ...], /, cached: CachedStep | None = None
    ) -> dict[Branch, Tensor]:
        own = velocity(packed_latents_1ND, t, branches[::ranks], cached)
        return {branch: own[branch] if branch in own else torch.empty_like(packed_latents_1ND) for branch in branches}

    return shared


class FakeSequenceParallel:
    """Stand-in that allocates like `SequenceParallel` on a rank with the most tokens. Call it inside `fake_device`.

    The model has the attention of `fake_attention`.
    """

    def __init__(self, model: MMDiT, mesh: MeshShape) -> None:
        self.model = model
        self._ranks = mesh.ring * mesh.ulysses

    def __call__(self, packed_latents_BND: Tensor, /, **inputs: object) -> Tensor:
        """Return the velocity of all tokens, with the arguments of `MMDiT.forward`."""
        share = self._cut(packed_latents_BND, 1)
        dims = SEQUENCE_INPUTS | TEXT_SEQUENCE_INPUTS
        cut = {
            name: self._cut(value, dims[name]) if isinstance(value, Tensor) and name in dims else value
            for name, value in inputs.items()
        }
        velocity: Tensor = self.model(share, **cut)
        return velocity if self._ranks == 1 else torch.empty_like(packed_latents_BND)

    def _cut(self, whole: Tensor, dim: int) -> Tensor:
        if self._ranks == 1:
            return whole
        return whole.narrow(dim, 0, shares(whole.shape[dim], self._ranks)[0]).clone()


def fake_attention(mesh: MeshShape, backend: AttentionBackend) -> AttentionFn:
    """Return a stand-in that allocates like the attention between ranks (`UlyssesAttention`, `RingAttention`).

    Chunks of heads and compressed exchanges need less. `backend` must run on fake tensors, such as the result of
    `attention_stand_in`.
    """
    attention = backend if mesh.ring == 1 else partial(_round_the_ring, backend, mesh.ring)
    return attention if mesh.ulysses == 1 else partial(_for_heads, attention, mesh.ulysses)


def _for_heads(attention: AttentionFn, ranks: int, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
    batch, heads, tokens, width = q_BHND.shape
    shape = batch, shares(heads, ranks)[0], tokens * ranks, width
    q, k, v = _exchanged([q_BHND, k_BHND, v_BHND], shape)
    (out,) = _exchanged([attention(q, k, v)], q_BHND.shape)
    return out


def _exchanged(tensors: list[Tensor], shape: tuple[int, ...]) -> list[Tensor]:
    sent = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    received = sent.new_empty(len(tensors), *shape)
    del sent
    return [part.clone() for part in received]


def _round_the_ring(backend: AttentionBackend, ranks: int, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, /) -> Tensor:
    # Keys and values that arrived, and those in transit.
    coming = [torch.empty_like(tensor) for tensor in (k_BHND, v_BHND, k_BHND, v_BHND)]
    out = torch.empty_like(q_BHND, dtype=accumulation_dtype(q_BHND.dtype))
    for _ in range(ranks):
        # Either way a fused kernel allocates its result.
        part = backend(q_BHND, *coming[:2]) if backend is sdpa else MATH_PARTS.attend(q_BHND, coming[0], coming[1])[0]
        out.lerp_(part.to(out.dtype), 0.5)
        del part
    del coming
    return out.to(q_BHND.dtype)
