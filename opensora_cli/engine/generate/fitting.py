"""What is given up to fit a generation into the memory of its device: estimated, chosen, and chosen again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from opensora_cli.core.linear_products import LinearProducts
from opensora_cli.core.private_memory import read_private_memory
from opensora_cli.engine.components.autoencoders import count_decoder_tiles, decodes_in_chunks
from opensora_cli.engine.components.configs import count_parameters, mmdit_config
from opensora_cli.engine.components.hardware import Hardware
from opensora_cli.engine.components.weights import Component, WeightFiles
from opensora_cli.engine.estimate.file_bytes import FileWeights, can_be_cast_later, file_weights
from opensora_cli.engine.estimate.generation import GenerationSizes, computes_modulation_first, estimate_generation
from opensora_cli.engine.estimate.offload import (
    CHUNK_TOKENS,
    DECODE,
    DENOISE,
    OffloadPlan,
    StageMemory,
    Streamable,
    choose_offload,
    largest_batch,
    stronger_offload,
)
from opensora_cli.models.mmdit.blocks import repeated_blocks
from opensora_cli.parallel.mesh import MeshShape
from opensora_cli.settings.enums import HostWeights, OffloadMode
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.sampling import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """One generation on one device, whose offload is to be chosen."""

    settings: GenerateSettings
    hardware: Hardware
    weights: WeightFiles
    sizes: GenerationSizes
    parameters: Mapping[Component, int]
    files: Mapping[Component, FileWeights] | None
    """On a CPU, what is computed with where it is mapped."""
    clips: int
    """That are there to be computed together."""
    held_bytes: int = 0
    """Of the host's memory, for frames that are there beside every stage."""

    @classmethod
    def of(
        cls,
        settings: GenerateSettings,
        *,
        hardware: Hardware,
        weights: WeightFiles,
        sizes: GenerationSizes,
        clips: int,
        held_bytes: int = 0,
    ) -> "Fitting":
        """Look at the headers of the weights; a RequestError if sizes contradict each other."""
        parameters = count_parameters(settings, weights)
        files = None
        if hardware.device.type == "cpu":
            # In 8 bits it is a copy, as the rest of the blocks.
            first = computes_modulation_first(settings) and not settings.memory.fp8_storage
            files = file_weights(settings, weights, parameters, hardware.dtype, modulation_first=first)
        return cls(
            settings=settings,
            hardware=hardware,
            weights=weights,
            sizes=sizes,
            parameters=parameters,
            files=files,
            clips=clips,
            held_bytes=held_bytes,
        )

    @property
    def budget_bytes(self) -> int:
        """The memory that may be used: what is free, or `memory.limit`."""
        return min(self.hardware.free_bytes, self.settings.memory.limit or self.hardware.free_bytes)

    @property
    def streamable(self) -> Streamable:
        """What may come to the device piece by piece."""
        frames = decodes_in_chunks(self.settings.vae)
        if self.files is None:
            return Streamable(frames=frames)
        dtype = self.hardware.dtype
        in_8_bits = self.settings.memory.fp8_storage or self.settings.precision.linear is not LinearProducts.EXACT
        blocks = can_be_cast_later(self.files[Component.TRANSFORMER], dtype) and not in_8_bits
        text = can_be_cast_later(self.files[Component.T5], dtype, is_text=True)
        # Ranks that share T5's layers compute a part of them each, and those that stream them compute all.
        alone = self.sizes.mesh.size == 1
        return Streamable(blocks=blocks, text=text, frames=frames, from_page_cache=True, text_first=alone)

    @property
    def ignored(self) -> str | None:
        """Which settings of offload have no effect here, and why; None: all have."""
        memory = self.settings.memory
        asked = {
            "memory.offload": memory.offload if memory.offload is OffloadMode.BLOCKS else None,
            "memory.resident_blocks": memory.resident_blocks,
            "memory.host_weights": memory.host_weights,
        }
        if self.settings.from_latents is not None or self.streamable.blocks:
            if self.files is None or memory.host_weights is not HostWeights.PINNED:
                return None
            asked = {"memory.host_weights": memory.host_weights}
        named = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        if not named:
            return None
        return f"{named} has no effect on a CPU, which computes with weights where they are mapped from their file"

    def estimate(self, offload: OffloadPlan) -> tuple[StageMemory, ...]:
        """Return what each stage needs with an offload."""
        stages = estimate_generation(
            self.settings,
            sizes=self.sizes,
            dtype=self.hardware.dtype,
            device_type=self.hardware.device.type,
            offload=offload,
            parameters=self.parameters,
            text_folders=self.weights.paths,
            files=self.files,
        )
        held = self.held_bytes if self.hardware.device.type == "cpu" else 0
        return tuple(replace(stage, data_bytes=stage.data_bytes + held) for stage in stages)

    def choose(self, budget_bytes: int) -> OffloadPlan:
        """Return the offload that gives up least of what fits; where nothing fits, the one that needs least."""
        memory = self.settings.memory
        if self.files is not None:  # where a copy would gain nothing
            memory = memory.replace({"host_weights": None})
        asked = self.settings.sampling.batch_size
        plan = choose_offload(
            memory,
            self.estimate,
            budget=budget_bytes,
            num_blocks=num_blocks(self.settings),
            host_weights=self._host_weights(self.sizes.mesh),
            streamable=self.streamable,
            batch_size=1 if asked == AUTO else min(asked, self.clips),
            linear=self.settings.precision.linear,
            # Compiled blocks compute all at once.
            chunk_tokens=max(CHUNK_TOKENS, self._tokens) if self.settings.compile else CHUNK_TOKENS,
            modulation_first=computes_modulation_first(self.settings),
            host_is_device=self.hardware.device.type == "cpu",
        )
        if asked == AUTO:
            most = min(self.clips, self._enough_clips) if self.sizes.mesh.size == 1 else 1
            plan = largest_batch(
                lambda size: replace(plan, batch_size=size), DENOISE, self.estimate, budget=budget_bytes, most=most
            )
        # In tiles and chunks, a clip alone keeps the device busy.
        is_whole = plan.chunk_frames is None and count_decoder_tiles(self.sizes.latent_shape, self.settings.vae) == 1
        return largest_batch(
            lambda size: replace(plan, decode_batch_size=size),
            DECODE,
            self.estimate,
            budget=budget_bytes,
            most=plan.batch_size if is_whole else 1,
        )

    @property
    def _tokens(self) -> int:
        """Of one clip and its text."""
        _, *positions = self.sizes.latent_shape
        return prod(positions) // self.settings.model.patch_size**2 + self.settings.text.t5_max_length

    @property
    def _enough_clips(self) -> int:
        """Clips whose tokens together let matrix products run at full speed: more at a time gain nothing."""
        return max(1, CHUNK_TOKENS // self._tokens)

    def stronger(self, offload: OffloadPlan, stage: str) -> OffloadPlan | None:
        """Return an offload under which `stage`, which ran out of memory, needs much less; None: there is none."""
        return stronger_offload(
            offload,
            stage,
            num_blocks=num_blocks(self.settings),
            streamable=self.streamable,
            modulation_first=computes_modulation_first(self.settings),
        )

    def _host_weights(self, mesh: MeshShape) -> HostWeights:
        """Return where offloaded blocks wait: for a GPU best in a page-locked copy, if the machine has room for it.

        Several ranks would each make a copy; the mapped file they share.
        """
        if mesh.size > 1 or self.files is not None:
            return HostWeights.MAPPED
        transformer_bytes = self.parameters[Component.TRANSFORMER] * self.hardware.dtype.itemsize
        host_bytes = read_private_memory().free_bytes if self.hardware.is_here else self.hardware.host_bytes
        has_room = 1.25 * transformer_bytes < (host_bytes or 0)
        return HostWeights.PINNED if has_room else HostWeights.MAPPED


def num_blocks(settings: GenerateSettings) -> int:
    """Return how many blocks the transformer has; a RequestError if its sizes contradict each other."""
    return sum(stack.count for stack in repeated_blocks(mmdit_config(settings.model)))
