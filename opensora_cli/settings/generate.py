"""Settings of `osora generate`, and the rules that hold between them.

Rules that need no file and no hardware live here, so that `--dry-run` and the library see the same ones.
"""

from typing import Self

from pydantic import Field, field_validator, model_validator

from opensora_cli.core.attention_kinds import attention_problems
from opensora_cli.core.conditions import CONDITION_MODES, CONTINUING, Source
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.settings.base import Section, Words
from opensora_cli.settings.components import (
    DOWNLOAD_COMMAND,
    FileSettings,
    GenerationPrecisionSettings,
    LoraFile,
    ModelSettings,
    TextSettings,
    VAESettings,
)
from opensora_cli.settings.condition import ConditionSettings
from opensora_cli.settings.devices import MemorySettings, ParallelSettings, RuntimeSettings
from opensora_cli.settings.enums import DType, ModelName, VAEKind
from opensora_cli.settings.explain import either
from opensora_cli.settings.lengthened import draft_problems, extension_problems, time_problems
from opensora_cli.settings.output import OutputSettings
from opensora_cli.settings.picture import PictureSettings
from opensora_cli.settings.prompts import (
    PromptAt,
    PromptSuffixSettings,
    RefineSettings,
    with_asked_score,
    with_first_prompt,
)
from opensora_cli.settings.sampling import MAX_SEED, SamplingSettings
from opensora_cli.settings.video import DraftSettings, VideoSettings


class GenerateSettings(Section):
    """Everything that decides what `osora generate` makes."""

    prompt: Words = Field(default="", description="what the video shows")
    prompts_at: tuple[PromptAt, ...] = Field(
        default=(),
        description="prompts of an extended video by time, each 2s=PROMPT; as text, separated by ;. A segment has the "
        "one of the time at which its own frames begin",
    )
    negative_prompt: Words = Field(default="", description="what it should not show")
    from_latents: str | None = Field(default=None, description="saved latents to decode, instead of sampling new ones")
    resume: str | None = Field(default=None, description="latents of a run that was stopped, which is to be finished")
    loras: tuple[LoraFile, ...] = Field(
        default=(), description="adapters added to the transformer, each FILE or FILE:SCALE; as text, separated by ;"
    )
    model: ModelSettings = ModelSettings()
    vae: VAESettings = VAESettings()
    text: TextSettings = TextSettings()
    files: FileSettings = FileSettings()
    video: VideoSettings = VideoSettings()
    sampling: SamplingSettings = SamplingSettings()
    condition: ConditionSettings = ConditionSettings()
    refine: RefineSettings = RefineSettings()
    picture: PictureSettings = PictureSettings()
    draft: DraftSettings = DraftSettings()
    prompt_suffix: PromptSuffixSettings = PromptSuffixSettings()
    output: OutputSettings = OutputSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    compile: bool = Field(default=False, description="compile the transformer's blocks with torch.compile")
    precision: GenerationPrecisionSettings = GenerationPrecisionSettings()
    memory: MemorySettings = MemorySettings()
    parallel: ParallelSettings = ParallelSettings()

    @model_validator(mode="before")
    @classmethod
    def _read_short_forms(cls, sections: object) -> object:
        return with_first_prompt(with_asked_score(sections))

    @field_validator("prompts_at", mode="before")
    @classmethod
    def _read_prompts(cls, value: object) -> object:
        return PromptAt.of_list(value)

    @field_validator("loras", mode="before")
    @classmethod
    def _read_loras(cls, value: object) -> object:
        # The first to see the value, as that of `condition.references`.
        return LoraFile.of_list(value)

    @property
    def output_format(self) -> MediaFormat:
        """What results are written as."""
        return self.output.resolved_format(num_frames=self.video.num_frames)

    @property
    def num_latent_frames(self) -> int:
        """Latent frames of the video."""
        return (self.video.num_frames - 1) // self.vae.grid.time_compression_ratio + 1

    @property
    def overlap(self) -> int:
        """Frames that a segment of a video has from the one before it, where it is extended."""
        grid = self.vae.grid
        return self.condition.lengths.pixel_frames(
            CONTINUING, causal=grid.is_causal, temporal_compression=grid.time_compression_ratio
        )

    @property
    def segment_starts(self) -> tuple[int, ...]:
        """The first own frame of each segment."""
        clip = self.video.num_frames
        return (0, *(clip + number * (clip - self.overlap) for number in range(self.video.extend)))

    @property
    def segment_prompts(self) -> tuple[str, ...]:
        """The prompt of each segment; times count to the nearest frame."""
        held = [(0, self.prompt), *((round(each.at_s * self.video.fps), each.prompt) for each in self.prompts_at)]
        return tuple([prompt for at, prompt in held if at <= start][-1] for start in self.segment_starts)

    @property
    def num_frames(self) -> int:
        """Frames of the result, of all its segments."""
        clip = self.video.num_frames
        return clip - self.condition.seamless + self.video.extend * (clip - self.overlap)

    @property
    def size_multiple(self) -> int:
        """What height and width must be multiples of: the side of one token, in pixels."""
        return self.vae.grid.spatial_compression_ratio * self.model.patch_size

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        problems = [
            *_prompt_problems(self),
            *_model_problems(self),
            *_size_problems(self),
            *_length_problems(self),
            *_seed_problems(self),
            *_stop_problems(self),
            *_condition_problems(self),
            *extension_problems(self),
            *time_problems(self),
            *_picture_problems(self),
            *draft_problems(self),
            *_parallel_problems(self),
            *self.precision.tf32_problems(key="runtime.device", device=self.runtime.device),
            *attention_problems(
                self.runtime.attention,
                setting="runtime.attention",
                ring_degree=self.parallel.ring_degree,
                is_fp32=self.runtime.dtype is DType.FLOAT32,
            ),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _prompt_problems(settings: GenerateSettings) -> list[str]:
    if settings.resume is not None and settings.from_latents is not None:
        return ["resume goes on with sampling, and from_latents leaves it out: drop one of them"]
    if settings.prompt.strip() or settings.from_latents:
        return []
    return [
        'prompt is empty: say what the video shows, as in osora generate "raining, sea"; a plan (--dry-run) needs it '
        "too, since results are named after it"
    ]


def _model_problems(settings: GenerateSettings) -> list[str]:
    model, vae = settings.model, settings.vae
    problems = []
    if not vae.kind.makes_videos and settings.video.num_frames > 1 and settings.video.max_frames > 1:
        problems.append(
            f"vae.kind={vae.kind} makes pictures, and video.num_frames={settings.video.num_frames}: "
            f"use video.num_frames=1, or vae.kind={either([kind.value for kind in VAEKind if kind.makes_videos])}"
        )
    channels = vae.grid.latent_channels * model.patch_size**2
    if model.in_channels != channels:
        problems.append(
            f"model.in_channels={model.in_channels} must be vae.latent_channels={vae.grid.latent_channels} x "
            f"model.patch_size={model.patch_size} squared: use {channels}"
        )
    chosen = settings.runtime.model_choice
    if chosen not in (ModelName.AUTO, model.name):
        problems.append(f"model.name={model.name} must be runtime.model_choice={chosen}: drop one of them")
    return problems


def _size_problems(settings: GenerateSettings) -> list[str]:
    video = settings.video
    multiple = settings.size_multiple
    if video.height is not None and video.width is not None:
        return [
            f"video.{name}={value} must be a multiple of {multiple}: use {either(_near_multiples(value, multiple))}"
            for name, value in (("height", video.height), ("width", video.width))
            if value % multiple
        ]
    problems = []
    if video.resolution not in video.resolutions:
        fix = f"use {either(video.resolutions)}"
        if settings.model.name is ModelName.DEMO:
            fix += f", or get the released model: {DOWNLOAD_COMMAND}"
        problems.append(f"video.resolution={video.resolution} is not a size of the {settings.model.name} model: {fix}")
    if video.aspect_ratio not in video.aspect_ratios:
        problems.append(
            f"video.aspect_ratio={video.aspect_ratio} is not one of the {settings.model.name} model: "
            f"use {either(video.aspect_ratios)}"
        )
    return problems


def _length_problems(settings: GenerateSettings) -> list[str]:
    video, grid = settings.video, settings.vae.grid
    ratio, end = grid.time_compression_ratio, video.max_frames + 1
    if video.max_frames == 1:
        makes = f"video.num_frames={video.num_frames} must be 1 with the {settings.model.name} model"
        return [] if video.num_frames == 1 else [f"{makes}, which makes pictures"]
    if grid.is_causal and video.causal_lengths:
        return [f"video.causal_lengths=true has no effect with vae.kind={settings.vae.kind}, which is causal: drop it"]
    if grid.is_causal:
        lengths, rule = range(1, end, ratio), f"a multiple of {ratio}, plus 1,"
    elif video.causal_lengths:
        lengths, rule = range(ratio + 1, end), f"1, or at least {ratio + 1}"
    else:
        # A single latent frame is decoded to a picture.
        lengths, rule = range(2 * ratio, end, ratio), f"1, or a multiple of {ratio} from {2 * ratio} on,"
    if video.num_frames == 1 or video.num_frames in lengths:
        return []
    longest = lengths[-1] if lengths else 1
    nearest = lengths.start + round((video.num_frames - lengths.start) / lengths.step) * lengths.step
    return [
        f"video.num_frames={video.num_frames} must be {rule} and at most {longest} with the {settings.model.name} "
        f"model: use {min(max(nearest, lengths.start), longest)}"
    ]


def _seed_problems(settings: GenerateSettings) -> list[str]:
    seed, samples = settings.sampling.seed, settings.sampling.num_samples
    if seed + samples - 1 <= MAX_SEED:
        return []
    return [
        f"sampling.seed={seed} must leave room for the seeds of sampling.num_samples={samples}: "
        f"use at most {MAX_SEED - samples + 1}"
    ]


def _stop_problems(settings: GenerateSettings) -> list[str]:
    stop, steps = settings.sampling.stop_at, settings.sampling.num_inference_steps
    if settings.output.explore and stop is None:
        return ["output.explore=true needs sampling.stop_at, after which seeds are compared: give --explore-steps"]
    if settings.output.explore and (settings.resume is not None or settings.from_latents is not None):
        return ["output.explore=true begins samples, and resume and from_latents go on with one: drop one of them"]
    if stop is None or stop < steps:
        return []
    return [f"sampling.stop_at={stop} must be less than sampling.num_inference_steps={steps}: drop it, or use fewer"]


def _condition_problems(settings: GenerateSettings) -> list[str]:
    condition = settings.condition
    if condition.mode is None:
        return []
    if condition.seamless and condition.mode != "i2v_loop":
        return [f"condition.seamless=true has no effect with condition.mode={condition.mode}: use i2v_loop, or drop it"]
    mode, references = CONDITION_MODES[condition.mode], len(condition.references)
    if not mode.needs_reference and references:
        return [f"condition.mode={mode.name} takes no reference, and {_files(references)} given: drop --cond or --ref"]
    if mode.needs_reference and not references and not settings.picture.first:
        kind = "video" if mode.source is Source.VIDEO else "picture"
        return [f"condition.mode={mode.name} needs a reference: give the {kind} with --ref FILE"]
    problems = []
    if references > mode.max_references:
        problems.append(
            f"condition.mode={mode.name} takes {either([str(n + 1) for n in range(mode.max_references)])} "
            f"reference{'s' if mode.max_references > 1 else ''}, and {_files(references)} given: drop some"
        )
    if mode.needs_reference and not settings.model.cond_embed:
        problems.append(
            f"condition.mode={mode.name} needs a model that takes references (model.cond_embed=true): use t2v"
        )
    grid = settings.vae.grid
    if mode.source is Source.VIDEO and settings.video.causal_lengths and not grid.is_causal:
        problems.append(
            f"condition.mode={mode.name} would give frames that vae.kind={settings.vae.kind} cannot encode, 1 more "
            f"than a multiple of {grid.time_compression_ratio}: use video.causal_lengths=false"
        )
    given = condition.lengths.given_latent_frames(mode, causal=grid.is_causal)
    if given >= settings.num_latent_frames:
        shortest = grid.num_frames(given + 1)
        problems.append(
            f"video.num_frames={settings.video.num_frames} leaves nothing to make, since condition.mode={mode.name} "
            f"gives {given} latent frames: use at least {shortest}"
            + (" or another mode" if shortest > settings.video.max_frames else "")
        )
    return problems


def _picture_problems(settings: GenerateSettings) -> list[str]:
    picture, condition = settings.picture, settings.condition
    if not picture.first:
        return ["picture.save=true has no effect without picture.first=true: give --t2i2v, too"] if picture.save else []
    problems = []
    if condition.references:
        problems.append(
            f"picture.first=true makes the reference, and {_files(len(condition.references))} given: drop --t2i2v "
            "or --ref"
        )
    if condition.mode is not None and not CONDITION_MODES[condition.mode].gives_pictures:
        fitting = [mode.name for mode in CONDITION_MODES.values() if mode.gives_pictures]
        problems.append(
            f"condition.mode={condition.mode} takes no picture, and picture.first=true makes one: use {either(fitting)}"
        )
    return problems


def _parallel_problems(settings: GenerateSettings) -> list[str]:
    parallel, model = settings.parallel, settings.model
    problems = []
    if parallel.devices is not None and settings.runtime.device != "auto":
        problems.append(
            f"parallel.devices and runtime.device={settings.runtime.device} both name devices: drop one of them"
        )
    if parallel.world_size > 1 and settings.runtime.device.startswith("cuda:"):
        problems.append(
            f"runtime.device={settings.runtime.device} is one GPU, and parallel.gpus asks for more: use --devices"
        )
    tensor = parallel.tensor_parallel_degree or 1
    if settings.compile and parallel.watch:
        problems.append("parallel.watch=true does not go with compile=true, which would compile nothing: use one")
    if settings.compile and tensor > 1:
        problems.append(
            f"compile=true does not go with parallel.tensor_parallel_degree={tensor}, whose layers talk to other "
            "devices: use parallel.ulysses_degree, or compile=false"
        )
    if model.num_heads % tensor:
        fitting = [str(degree) for degree in range(1, model.num_heads + 1) if model.num_heads % degree == 0]
        problems.append(
            f"parallel.tensor_parallel_degree={tensor} must divide model.num_heads={model.num_heads}: "
            f"use {either(fitting)}"
        )
    heads = model.num_heads // tensor
    if parallel.ulysses_degree is not None and parallel.ulysses_degree > heads:
        problems.append(
            f"parallel.ulysses_degree={parallel.ulysses_degree} must be at most the {heads} heads of a device: "
            "use parallel.ring_degree for more"
        )
    return problems


def _near_multiples(value: int, multiple: int) -> list[str]:
    below = value // multiple * multiple
    return [str(size) for size in (below, below + multiple) if size]


def _files(count: int) -> str:
    return "1 file is" if count == 1 else f"{count} files are"
