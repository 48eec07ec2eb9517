"""Settings of `osora generate`, and the rules between them.

These rules need no files and no hardware, so that `--dry-run` and the library share them.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise

from pydantic import Field, model_validator

from opensora_cli.core import device_names
from opensora_cli.core.attention import attention_problems
from opensora_cli.core.choices import MediaFormat
from opensora_cli.core.conditions import CONDITION_MODES, CONTINUING, ConditionMode, Source
from opensora_cli.core.formatting import either
from opensora_cli.core.section import Section, Words
from opensora_cli.models.registry import AUTO, DEMO, TextInputs, WeightNames
from opensora_cli.settings import components
from opensora_cli.settings import generate_sections as sections
from opensora_cli.settings.applies import GENERATE, Pair, pair_problems
from opensora_cli.settings.components import VAEKind
from opensora_cli.settings.devices import DType, MemorySettings, ParallelSettings, RuntimeSettings

_NEEDS = (
    Pair("output.explore", "sampling.stop_at", "give --explore-steps, after which seeds are compared"),
    Pair("output.explore", "output.save_latents", "use true, since a chosen seed continues from them"),
)
_CONFLICTS = (
    Pair("resume", "from_latents", "drop one of them"),
    Pair("output.explore", "resume", "drop one of them"),
    Pair("output.explore", "from_latents", "drop one of them"),
    Pair("refine.prompt", "prompts_at", "a server rewrites one prompt, so drop one of them"),
    Pair("condition.seamless", "video.extend", "segments continue after the last frame, so drop one of them"),
    Pair("condition.seamless", "condition.continued!=none", "drop one of them"),
    Pair("draft.resolution", "condition.continued!=none", "drop one of them"),
    Pair("draft.resolution", "video.extend", "a draft is for one clip, so drop one of them"),
    Pair("draft.resolution", "picture.first", "make the picture alone, and give it with --ref"),
    Pair("draft.resolution", "sampling.num_inference_steps=1", "use 2 or more"),
    Pair("sampling.stop_at", "video.extend", "a run stops in its first segment, so drop one of them"),
    Pair("sampling.fast", "sampling.turbo", "the adapter has its own steps, so drop one of them"),
    Pair("sampling.step_cache", "sampling.solver=heun", "use ab2"),
    Pair("video.extend", "video.num_frames=1", "drop --extend, or ask for more frames"),
    Pair("picture.first", "condition.references", "drop --t2i2v or --ref"),
    Pair("parallel.devices", "runtime.device!=auto", "drop one of them"),
    Pair("compile", "parallel.tensor_parallel_degree>1", "use parallel.ulysses_degree, or compile=false"),
)


class GenerateSettings(Section):
    """Settings of `osora generate`."""

    applies = GENERATE

    prompt: Words = Field("", description="Description of the video.")
    prompts_at: sections.PromptsAt = Field((), description="With --extend: prompt from a time on, as in 2s=snow.")
    negative_prompt: Words = Field("", description="Description of things that the video should not show.")
    from_latents: str | None = Field(None, description="Finished latents to decode, as --from does.")
    resume: str | None = Field(None, description="Saved latents of a stopped run to continue, as --from does.")
    loras: components.LoraFiles = Field((), description="LoRAs: PEFT folders, or diffusers, ComfyUI or kohya files.")
    model: components.ModelSettings = components.ModelSettings()
    vae: components.VAESettings = components.VAESettings()
    text: TextInputs = TextInputs()
    files: WeightNames = WeightNames()
    video: sections.VideoSettings = sections.VideoSettings()
    sampling: sections.SamplingSettings = sections.SamplingSettings()
    condition: sections.ConditionSettings = sections.ConditionSettings()
    refine: sections.RefineSettings = sections.RefineSettings()
    picture: sections.PictureSettings = sections.PictureSettings()
    draft: sections.DraftSettings = sections.DraftSettings()
    prompt_suffix: sections.PromptSuffixSettings = sections.PromptSuffixSettings()
    output: sections.OutputSettings = sections.OutputSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    compile: bool = Field(False, description="Compile the transformer's blocks with torch.compile.")
    precision: components.GenerationPrecisionSettings = components.GenerationPrecisionSettings()
    memory: MemorySettings = MemorySettings()
    parallel: ParallelSettings = ParallelSettings()

    @model_validator(mode="before")
    @classmethod
    def _read_automatic_score(cls, values: object) -> object:
        """Read `prompt_suffix.motion_score=auto` as `refine.motion_score=true`."""
        if not isinstance(values, Mapping):
            return values
        suffix, refine = values.get("prompt_suffix"), values.get("refine", {})
        if isinstance(suffix, Mapping) and isinstance(refine, Mapping) and suffix.get("motion_score") == "auto":
            others = {name: value for name, value in suffix.items() if name != "motion_score"}
            return {**values, "prompt_suffix": others, "refine": {**refine, "motion_score": True}}
        return values

    @property
    def output_format(self) -> MediaFormat:
        """File format of the results."""
        usual = MediaFormat.PNG if self.video.num_frames == 1 else MediaFormat.MP4
        return self.output.format or self.output.named_format or usual

    @property
    def num_samples(self) -> int:
        """Number of results."""
        return 1 if self.from_latents is not None else self.sampling.num_samples

    @property
    def num_latent_frames(self) -> int:
        """Latent frames of a segment that is shown."""
        return (self.video.num_frames - 1) // self.vae.grid.time_compression_ratio + 1

    @property
    def sampled_latent_frames(self) -> int:
        """Latent frames of a segment that is sampled: more than are shown for a picture with `video.picture_frames`.

        A picture that starts from a draft is sampled alone, since the draft is a picture, too.
        """
        video, grid = self.video, self.vae.grid
        if video.num_frames > 1 or self.draft.resolution is not None:
            return self.num_latent_frames
        return grid.latent_frames(grid.longest_clip(min(video.picture_frames, video.max_frames)))

    @property
    def overlap(self) -> int:
        """Frames that a segment repeats from the previous one."""
        return self._frames_of(CONTINUING)

    @property
    def given_frames(self) -> int:
        """Frames that a reference gives at the head in the condition mode."""
        return self._frames_of(CONDITION_MODES[self.condition.mode or CONTINUING.name])

    def _frames_of(self, mode: ConditionMode) -> int:
        grid = self.vae.grid
        return self.condition.lengths.pixel_frames(
            mode, causal=grid.is_causal, temporal_compression=grid.time_compression_ratio
        )

    @property
    def segment_starts(self) -> tuple[int, ...]:
        """First new frame of each segment."""
        clip = self.video.num_frames
        return (0, *(clip + number * (clip - self.overlap) for number in range(self.video.extend)))

    @property
    def segment_prompts(self) -> tuple[str, ...]:
        """Prompt of each segment. Times are rounded to frames."""
        held = [(0, self.prompt), *((round(each.at_s * self.video.fps), each.prompt) for each in self.prompts_at)]
        return tuple([prompt for at, prompt in held if at <= start][-1] for start in self.segment_starts)

    @property
    def num_frames(self) -> int:
        """Frames of the result, with all segments."""
        clip = self.video.num_frames
        kept = max(0, (self.condition.continued or 0) - self.given_frames)
        return kept + clip - self.condition.seamless + self.video.extend * (clip - self.overlap)

    @property
    def size_multiple(self) -> int:
        """Side of a token in pixels. Height and width are multiples of it."""
        return self.vae.grid.spatial_compression_ratio * self.model.patch_size

    def rules(self) -> Iterator[str]:
        yield from pair_problems(self, needs=_NEEDS, conflicts=_CONFLICTS)
        yield from _request_problems(self)
        yield from _size_problems(self)
        yield from _length_problems(self)
        yield from _condition_problems(self)
        yield from _time_problems(self)
        yield from _parallel_problems(self)
        yield from components.channel_problems(self.model, self.vae.grid)
        yield from attention_problems(
            self.runtime.attention,
            setting="runtime.attention",
            ring_degree=self.parallel.ring_degree,
            is_fp32=self.runtime.dtype is DType.FLOAT32,
        )


def _request_problems(settings: GenerateSettings) -> Iterator[str]:
    model, vae, video, chosen = settings.model, settings.vae, settings.video, settings.runtime.model_choice
    if not settings.prompt.strip() and not settings.from_latents:
        yield 'prompt is empty: describe the video, as in osora generate "raining, sea"; results are named after it'
    if not vae.kind.makes_videos and video.num_frames > 1 and video.max_frames > 1:
        yield (
            f"vae.kind={vae.kind} makes pictures, and video.num_frames={video.num_frames}: "
            f"use video.num_frames=1, or vae.kind={either([kind.value for kind in VAEKind if kind.makes_videos])}"
        )
    if chosen not in (AUTO, model.name):
        yield f"model.name={model.name} must be runtime.model_choice={chosen}: drop one of them"


def _size_problems(settings: GenerateSettings) -> Iterator[str]:
    video, multiple, name = settings.video, settings.size_multiple, settings.model.name
    if video.height is not None and video.width is not None:
        for side, value in (("height", video.height), ("width", video.width)):
            below = value // multiple * multiple
            if value != below:
                fitting = [str(size) for size in (below, below + multiple) if size]
                yield f"video.{side}={value} must be a multiple of {multiple}: use {either(fitting)}"
        return
    if settings.draft.resolution is not None and len(video.resolutions) == 1:
        yield f"draft.resolution does not go with the {name} model, which has one size: drop it"
        return
    fix = f", or get the released model: {components.DOWNLOAD_COMMAND}" if name == DEMO else ""
    for key, asked, known, more in (
        ("video.resolution", video.resolution, video.resolutions, fix),
        ("video.aspect_ratio", video.aspect_ratio, video.aspect_ratios, ""),
        ("draft.resolution", settings.draft.resolution, video.resolutions, ""),
    ):
        if asked is not None and asked not in known:
            yield f"{key}={asked} does not suit the {name} model: use {either(known)}{more}"


def _length_problems(settings: GenerateSettings) -> Iterator[str]:
    video, grid, name = settings.video, settings.vae.grid, settings.model.name
    ratio, end, frames = grid.time_compression_ratio, video.max_frames + 1, video.num_frames
    if video.max_frames == 1 and frames != 1:
        yield f"video.num_frames={frames} must be 1 with the {name} model, which makes pictures"
    if frames == 1 or video.max_frames == 1:
        return
    if grid.is_causal:
        lengths, rule = range(1, end, ratio), f"a multiple of {ratio}, plus 1,"
    elif video.causal_lengths:
        lengths, rule = range(ratio + 1, end), f"1, or at least {ratio + 1}"
    else:
        # A single latent frame is decoded to a picture.
        lengths, rule = range(2 * ratio, end, ratio), f"1, or a multiple of {ratio} from {2 * ratio} on,"
    if frames not in lengths:
        longest = lengths[-1] if lengths else 1
        yield (
            f"video.num_frames={frames} must be {rule} and at most {longest} with the {name} model: "
            f"use {min(lengths, key=lambda length: (abs(length - frames), -length), default=1)}"
        )


def _condition_problems(settings: GenerateSettings) -> Iterator[str]:
    condition, count = settings.condition, len(settings.condition.references)
    given = "1 file is given" if count == 1 else f"{count} files are given"
    if condition.continued is not None:
        modes = [mode.name for mode in CONDITION_MODES.values() if mode.source is Source.VIDEO and mode.at_head]
        if condition.mode not in (None, *modes):
            yield f"condition.mode={condition.mode} does not continue a video: use {either(modes)}"
        if count != 1:
            yield f"condition.continued needs 1 reference, and {given}: use --continue"
    if condition.mode is not None:
        mode, named = CONDITION_MODES[condition.mode], f"condition.mode={condition.mode}"
        if not mode.needs_reference and count:
            yield f"{named} takes no reference, and {given}: drop --cond or --ref"
        elif mode.needs_reference and not count and not settings.picture.first:
            kind = "video" if mode.source is Source.VIDEO else "picture"
            yield f"{named} needs a reference: give the {kind} with --ref FILE"
        else:
            if count > mode.max_references:
                yield f"{named} takes at most {mode.max_references}, and {given}: drop some"
            yield from _mode_problems(settings, mode, named, drop="use t2v")
        if settings.picture.first and not mode.gives_pictures:
            fitting = [mode.name for mode in CONDITION_MODES.values() if mode.gives_pictures]
            yield f"{named} takes no picture, and picture.first=true makes one: use {either(fitting)}"
    if settings.video.extend and settings.video.num_frames > 1:
        yield from _mode_problems(settings, CONTINUING, f"video.extend={settings.video.extend}", drop="drop --extend")


def _mode_problems(settings: GenerateSettings, mode: ConditionMode, named: str, *, drop: str) -> Iterator[str]:
    """Yield the problems of frames that are given in a condition mode, which the setting `named` asks for."""
    video, grid = settings.video, settings.vae.grid
    if mode.needs_reference and not settings.model.cond_embed:
        yield f"{named} needs a model that takes references (model.cond_embed=true): {drop}"
    if mode.source is Source.VIDEO and video.causal_lengths and not grid.is_causal:
        yield (
            f"{named} would give frames that vae.kind={settings.vae.kind} cannot encode, 1 more than a multiple of "
            f"{grid.time_compression_ratio}: use video.causal_lengths=false"
        )
    given = settings.condition.lengths.given_latent_frames(mode, causal=grid.is_causal)
    if given >= settings.num_latent_frames:
        shortest = grid.num_frames(given + 1)
        yield (
            f"video.num_frames={video.num_frames} leaves nothing to make, since {named} gives {given} latent frames: "
            f"use at least {shortest}" + (" or another mode" if shortest > video.max_frames else "")
        )


def _time_problems(settings: GenerateSettings) -> Iterator[str]:
    """Yield the first problem of prompts by time. Other problems may follow from the first."""
    prompts = settings.prompts_at if settings.video.extend else ()
    for earlier, later in pairwise(prompts):
        if later.at_s <= earlier.at_s:
            yield f"prompts_at={later.shown} must come after {earlier.at_s:g}s: give them in the order of their times"
            return
    for each in prompts:
        if each.prompt not in settings.segment_prompts:
            starts = ", ".join(f"{start / settings.video.fps:.3g}s" for start in settings.segment_starts)
            yield f"prompts_at={each.shown} has no effect, since no segment begins then: segments begin at {starts}"
            return


def _parallel_problems(settings: GenerateSettings) -> Iterator[str]:
    parallel, heads, device = settings.parallel, settings.model.num_heads, settings.runtime.device
    if parallel.world_size > 1 and device_names.has_index(device):
        yield f"runtime.device={device} is one GPU, and parallel.gpus asks for more: use --devices"
    if heads % (tensor := parallel.tensor_parallel_degree or 1):
        fitting = [str(degree) for degree in range(1, heads + 1) if heads % degree == 0]
        yield f"parallel.tensor_parallel_degree={tensor} must divide model.num_heads={heads}: use {either(fitting)}"
    yield from parallel.head_problems(heads)
