"""The options of commands, once each: name, type and help.

An option that is not given is None (or False, or empty), so that presets and files decide.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.core.media_choices import Fit, MediaFormat
from opensora_cli.core.solvers import Solver
from opensora_cli.settings.enums import (
    AspectRatio,
    AttentionChoice,
    DType,
    ModelName,
    NameFrom,
    OffloadMode,
    ReferenceRate,
)

_VIDEO = "Video"
_SAMPLING = "Sampling"
_REFERENCE = "Reference"
_OUTPUT = "Output"
MACHINES = "Several devices"
_MACHINE = "Model and machine"
_SETTINGS = "Settings"
_FILES = (".json", ".py", ".yaml", ".yml")


def completed_settings(*kinds: str) -> Callable[[str], list[str]]:
    """Return what completes `--config` in a shell: packaged settings of these kinds by name, folders, and files."""

    def complete(incomplete: str) -> list[str]:
        from opensora_cli.settings.files import list_presets

        begun = Path(incomplete)
        inside = not incomplete or incomplete.endswith(("/", os.sep))
        folder, start = (begun, "") if inside else (begun.parent, begun.name)
        found = sorted(
            path for path in folder.glob("*") if path.name.startswith(start) and not path.name.startswith(".")
        )
        files = [f"{path}/" if path.is_dir() else str(path) for path in found if path.is_dir() or path.suffix in _FILES]
        names = [name for kind in kinds for name in list_presets(kind) if name.startswith(incomplete)]
        return [*dict.fromkeys(names), *files]

    return complete


# What is made.
Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="What the video shows.", show_default=False)]
PromptText = Annotated[
    str | None,
    typer.Option("--prompt-text", metavar="TEXT", help="The prompt, also where a file has that name."),
]
Refine = Annotated[
    bool,
    typer.Option("--refine", help="Have the prompt rewritten by the language model at OSORA_REFINE_URL."),
]
NegativePrompt = Annotated[
    str | None, typer.Option("--negative-prompt", metavar="TEXT", help="What it should not show.")
]
Resolution = Annotated[
    str | None,
    typer.Option("--res", metavar="SIZE", help="Pixel count, such as 256px or 768px.", rich_help_panel=_VIDEO),
]
Aspect = Annotated[
    AspectRatio | None,
    typer.Option(
        "--aspect-ratio", metavar="W:H", help=f"Width to height: {', '.join(AspectRatio)}.", rich_help_panel=_VIDEO
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        metavar="N",
        help="Pixels, with --height: in place of --res and --aspect-ratio.",
        rich_help_panel=_VIDEO,
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        "--height",
        metavar="N",
        help="Pixels, with --width: in place of --res and --aspect-ratio.",
        rich_help_panel=_VIDEO,
    ),
]
NumFrames = Annotated[
    int | None,
    typer.Option(
        "--num-frames",
        metavar="N",
        help="Frames: a multiple of 4, plus 1; with open-sora-v2-dc-ae a multiple of 4. 1 makes a picture; flux1-dev "
        "makes no more.",
        rich_help_panel=_VIDEO,
    ),
]
Fps = Annotated[int | None, typer.Option("--fps", metavar="N", help="Frames per second.", rich_help_panel=_VIDEO)]
Extend = Annotated[
    int | None,
    typer.Option(
        "--extend",
        metavar="N",
        help="Make the video longer by N segments, each going on from the last frames of the one before.",
        rich_help_panel=_VIDEO,
    ),
]
PromptAt = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt-at",
        metavar="Ts=PROMPT",
        help="With --extend: what is shown from a time on, as in 2s=snow. Repeatable.",
        rich_help_panel=_VIDEO,
    ),
]
DraftResolution = Annotated[
    str | None,
    typer.Option(
        "--draft-res",
        metavar="SIZE",
        help="Make a smaller video first, and start from it: the one keeps what the other shows.",
        rich_help_panel=_SAMPLING,
    ),
]
DraftStrength = Annotated[
    float | None,
    typer.Option(
        "--draft-strength",
        metavar="X",
        help="With --draft-res: where to start, from 1 (noise) to 0 (the draft).",
        rich_help_panel=_SAMPLING,
    ),
]
MotionScore = Annotated[
    str | None,
    typer.Option(
        "--motion-score",
        metavar="N",
        help="How much should move, as in 4; none leaves it out of the prompt, auto asks the server of --refine.",
        rich_help_panel=_VIDEO,
    ),
]

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Many prompts: a .txt, a line each, or a .csv, .jsonl or .parquet with the columns prompt, ref, negative, "
        "seed, name, and any setting. What is finished is skipped.",
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Make every N-th row of --prompts, from number I on."),
]

# How.
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="Sampling steps.", rich_help_panel=_SAMPLING)]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help="Sample with few evaluations: 15 steps by ab2, the mean of guidance that oscillates, and a step cache. "
        "Nearly the same video.",
        rich_help_panel=_SAMPLING,
    ),
]
SolverOption = Annotated[
    Solver | None,
    typer.Option(
        "--solver",
        help="How a step gets on: as the reference, with the step before in view (ab2), or ahead, for twice the "
        "evaluations (heun). Default: euler.",
        rich_help_panel=_SAMPLING,
    ),
]
StopAt = Annotated[
    int | None,
    typer.Option(
        "--stop-at",
        metavar="N",
        min=1,
        help="Stop after N steps: NAME_stepN shows what is predicted by then, and --resume goes on.",
        rich_help_panel=_SAMPLING,
    ),
]
Explore = Annotated[
    int | None,
    typer.Option(
        "--explore",
        metavar="K",
        min=1,
        help="Begin K seeds and leave a sheet with a preview of each; --resume finishes those that you choose.",
        rich_help_panel=_SAMPLING,
    ),
]
ExploreSteps = Annotated[
    int | None,
    typer.Option(
        "--explore-steps",
        metavar="N",
        min=1,
        help="Steps of each seed that --explore begins.",
        rich_help_panel=_SAMPLING,
    ),
]
GuidanceScale = Annotated[
    float | None, typer.Option("--guidance-scale", metavar="X", help="Weight of the prompt.", rich_help_panel=_SAMPLING)
]
ImageGuidanceScale = Annotated[
    float | None,
    typer.Option("--image-guidance-scale", metavar="X", help="Weight of the reference.", rich_help_panel=_SAMPLING),
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the noise.", rich_help_panel=_SAMPLING)]
NumSamples = Annotated[
    int | None,
    typer.Option(
        "--num-samples", metavar="N", help="Videos to make, with seeds that follow.", rich_help_panel=_SAMPLING
    ),
]

# From what.
Condition = Annotated[
    str | None,
    typer.Option(
        "--cond",
        metavar="MODE",
        help=f"Which part of the video is given: {', '.join(CONDITION_MODES)}. Default: what suits the references.",
        autocompletion=lambda: list(CONDITION_MODES),
        rich_help_panel=_REFERENCE,
    ),
]
References = Annotated[
    list[str] | None,
    typer.Option(
        "--ref",
        metavar="FILE",
        help="Reference picture or video. Repeatable.",
        rich_help_panel=_REFERENCE,
    ),
]
FitOption = Annotated[
    Fit | None,
    typer.Option("--fit", help="How a reference of another shape is fitted in.", rich_help_panel=_REFERENCE),
]
ReferenceFps = Annotated[
    ReferenceRate | None,
    typer.Option(
        "--ref-fps",
        help="A reference video of another rate: keep its frames, or match the rate by resampling.",
        rich_help_panel=_REFERENCE,
    ),
]
PictureFirst = Annotated[
    bool,
    typer.Option(
        "--t2i2v",
        help="Make a picture first, with flux1-dev (the demo: by itself), and give it as the first frame.",
        rich_help_panel=_REFERENCE,
    ),
]
Seamless = Annotated[
    bool,
    typer.Option(
        "--seamless",
        help="With --cond i2v_loop: leave out the last frame, which repeats the first.",
        rich_help_panel=_REFERENCE,
    ),
]
SavePicture = Annotated[
    bool,
    typer.Option(
        "--save-picture", help="Keep that picture beside the video, as NAME.picture.png.", rich_help_panel=_REFERENCE
    ),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[:SCALE]",
        help="LoRA that is added to the model, SCALE times: PEFT's folder, or a file of diffusers, ComfyUI or kohya. "
        "Repeatable.",
        rich_help_panel=_SAMPLING,
    ),
]

# Where to.
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        help="A folder, or a file name that ends in .mp4, .gif, .webp or .png.",
        rich_help_panel=_OUTPUT,
    ),
]
Format = Annotated[
    MediaFormat | None,
    typer.Option(
        "--format",
        help="Kind of file. Default: from the file name, else mp4, and png of a picture.",
        rich_help_panel=_OUTPUT,
    ),
]
NameFromOption = Annotated[
    NameFrom | None,
    typer.Option(
        "--name-from",
        help="Name files in a folder by prompt and seed, or by the prompt as it is and the sample's number, as VBench "
        "reads them. Default: seed.",
        rich_help_panel=_OUTPUT,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.", rich_help_panel=_OUTPUT)]
SaveLastFrame = Annotated[
    bool,
    typer.Option(
        "--save-last-frame",
        help="Keep the last frame beside the video, as NAME.last.png: a reference for the next.",
        rich_help_panel=_OUTPUT,
    ),
]
PreviewEvery = Annotated[
    int | None,
    typer.Option(
        "--preview-every",
        metavar="N",
        min=1,
        help="Show in the terminal what is predicted after every N steps, and keep it as NAME.preview.gif.",
        rich_help_panel=_OUTPUT,
    ),
]
SaveStateEvery = Annotated[
    int | None,
    typer.Option(
        "--save-state-every",
        metavar="N",
        min=1,
        help="Save the latents after every N steps, to go on from; Ctrl-C saves them in any case.",
        rich_help_panel=_OUTPUT,
    ),
]
NoMetadata = Annotated[
    bool,
    typer.Option(
        "--no-metadata",
        help="Keep prompt, seed and settings out of the file, and write no sidecar.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.", rich_help_panel=_OUTPUT)]

# On what.
Model = Annotated[
    ModelName | None,
    typer.Option(
        "--model",
        help="auto takes open-sora-v2 where its weights and a CUDA device are there, else demo.",
        rich_help_panel=_MACHINE,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        help="Folder with the weights. Default: OSORA_WEIGHTS, ./ckpts or the Hugging Face cache.",
        rich_help_panel=_MACHINE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N. Default: auto.", rich_help_panel=_MACHINE
    ),
]
Dtype = Annotated[
    DType | None,
    typer.Option(
        "--dtype", help="auto is bfloat16 on CUDA, float32 on a CPU. Default: auto.", rich_help_panel=_MACHINE
    ),
]
Attention = Annotated[
    AttentionChoice | None,
    typer.Option(
        "--attention",
        help="Attention backend; auto is the first of a fixed order that works on the device. Default: auto.",
        rich_help_panel=_MACHINE,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="Threads that compute on the CPU. Default: OMP_NUM_THREADS, or chosen by work, cores and load.",
        rich_help_panel=_MACHINE,
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Encode all prompts, and keep none of them in ~/.cache/osora/prompts for the next time.",
        rich_help_panel=_MACHINE,
    ),
]
Offload = Annotated[
    OffloadMode | None,
    typer.Option(
        "--offload",
        help="What waits outside the device's memory; auto is the least that fits. It changes no result.",
        rich_help_panel=_MACHINE,
    ),
]
ResidentBlocks = Annotated[
    int | None,
    typer.Option(
        "--resident-blocks",
        metavar="N",
        help="With --offload blocks: transformer blocks on the device at a time. Default: as many as fit.",
        rich_help_panel=_MACHINE,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Most memory of the device to use, as in 24GiB. Default: what is free.",
        rich_help_panel=_MACHINE,
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="N",
        help="Devices of this machine that share the work; with --device cpu processes. Default: 1.",
        rich_help_panel=MACHINES,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="LIST", help="Which GPUs, as in 0,2. Default: the first ones.", rich_help_panel=MACHINES
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and whether it fits.", rich_help_panel=_MACHINE)
]

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="NxGPU|FILE",
        help="With --dry-run: plan for GPUs that need not be here, as in 8xH100, and predict the time; FILE: hardware "
        "of your own.",
        rich_help_panel=_MACHINE,
    ),
]


# With which settings.
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "--preset",
        metavar="NAME|FILE",
        help="Preset, YAML file of settings, or .py configuration of the reference; flags win over it.",
        autocompletion=completed_settings("generate"),
        rich_help_panel=_SETTINGS,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting, as in sampling.flow_shift=3. Repeatable.",
        rich_help_panel=_SETTINGS,
    ),
]
FromSidecar = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="SIDECAR",
        help="Make the video of an earlier run, as its .json file describes it; give --out, --weights, --lora again.",
        rich_help_panel=_SETTINGS,
    ),
]
FromLatents = Annotated[
    str | None,
    typer.Option(
        "--from-latents",
        metavar="FILE",
        help="Decode saved latents: go on after a run that failed while decoding or saving.",
        rich_help_panel=_SETTINGS,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="FILE",
        help="Go on with a run that was stopped, from the latents that it saved.",
        rich_help_panel=_SETTINGS,
    ),
]
ListPresets = Annotated[
    bool, typer.Option("--list-presets", help="List the presets and exit.", rich_help_panel=_SETTINGS)
]
