"""Settings of the demo's recipes: those of `osora train`, and a section `demo` for the procedural world."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated

from pydantic import Field

from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.section import Count, CountOrZero, FileName, Section, Share
from opensora_cli.settings.applies import refuse_without_effect
from opensora_cli.settings.devices import DeviceName
from opensora_cli.settings.layers import Given, collect_overrides, read_sections, read_settings_file, validate
from opensora_cli.settings.train import TrainSettings, model_entry
from opensora_cli.settings.train_sections import LoopSettings, OptimizerSettings, PrecisionSettings

RECIPES = Path(__file__).parents[1] / "recipes"

_Size = Annotated[int, Field(ge=1, le=2**16)]
_Layers = Annotated[int, Field(ge=1, le=1000)]
_BatchSize = Annotated[int, Field(ge=1, le=4096)]


class SceneSettings(Section):
    """Clips of the procedural world. Clip i of a seed is the same in every epoch and run."""

    count: Count = Field(default=100_000, description="Clips of an epoch.")
    size: int = Field(default=64, ge=32, le=1024, description="Width and height in pixels.")
    num_frames: int = Field(default=17, ge=1, le=1025, description="Frames of a clip.")
    fps: float = Field(default=12.0, gt=0, le=240, description="Frames per second.")
    batch_size: _BatchSize = Field(default=8, description="Clips of a micro-batch.")
    picture_share: Share = Field(default=0.0, description="Share of the clips that are single frames.")
    picture_batch_size: _BatchSize = Field(default=8, description="Single frames of a micro-batch.")

    @property
    def kinds(self) -> dict[int, tuple[float, int]]:
        """Frames of clips and of single frames -> their share of all, and the size of a micro-batch."""
        kinds = {self.num_frames: (1 - self.picture_share, self.batch_size)}
        if self.num_frames > 1:
            kinds[1] = (self.picture_share, self.picture_batch_size)
        return {length: kind for length, kind in kinds.items() if kind[0] > 0}

    def held_out(self, batches: int) -> "SceneSettings":
        """Return the same shapes, with enough scenes for so many micro-batches of each kind."""
        enough = max(ceil(batches * size / share) for share, size in self.kinds.values())
        return self.replace({"count": min(enough, self.count)})

    def rules(self) -> Iterator[str]:
        for share, size in self.kinds.values():
            if 0 < (clips := round(share * self.count)) < size:
                yield f"scenes.count={self.count} has {clips} clips for micro-batches of {size}: use a larger count"


class DemoSettings(Section):
    """Data of a recipe, and what is done with them besides `osora train`."""

    scenes: SceneSettings = SceneSettings()
    thing_weight: float = Field(default=1.0, ge=1, le=1000, description="Loss weight of the moving thing in a scene.")
    gather_taps: bool = Field(default=False, description="Prepare an autoencoder of pictures for clips.")
    whitening_clips: CountOrZero = Field(
        default=0, description="Clips that give exported latents mean 0 and variance 1. 0 keeps the learned scale."
    )


class TextEncoderSettings(Section):
    """Sizes of the two small text encoders, which learn to read scenes from captions."""

    batch_size: _Size = Field(default=128, description="Captions of a micro-batch.")
    t5_width: _Size = Field(default=128, description="Width of T5.")
    t5_layers: _Layers = Field(default=2, description="Layers of T5.")
    t5_heads: _Size = Field(default=4, description="Attention heads of T5. They divide its width.")
    t5_max_length: _Size = Field(default=32, description="Tokens that T5 reads, end token included.")
    clip_width: _Size = Field(default=128, description="Width of CLIP.")
    clip_layers: _Layers = Field(default=2, description="Layers of CLIP.")
    clip_heads: _Size = Field(default=4, description="Attention heads of CLIP. They divide its width.")
    clip_max_length: _Size = Field(default=32, description="Tokens that CLIP reads, start and end tokens included.")

    def rules(self) -> Iterator[str]:
        for name, width, heads in (("t5", self.t5_width, self.t5_heads), ("clip", self.clip_width, self.clip_heads)):
            if width % heads:
                yield f"text_encoders.{name}_heads={heads} must divide text_encoders.{name}_width={width}"


class TextRecipe(Section):
    """Recipe of the text encoders."""

    output: FileName = Field(default="runs/demo_text", description="Folder of the log and the exported encoders.")
    device: DeviceName = Field(default="cpu", description="auto, cpu, cuda or cuda:N.")
    text_encoders: TextEncoderSettings = TextEncoderSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    precision: PrecisionSettings = PrecisionSettings()
    loop: LoopSettings = LoopSettings()


class _Keys(TrainSettings):
    """All keys of a recipe of the autoencoder or the transformer."""

    demo: DemoSettings = DemoSettings()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of the autoencoder or the transformer."""

    settings: TrainSettings
    demo: DemoSettings


def list_recipes() -> list[str]:
    """Return the names of the recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name: str, assignments: Iterable[str] = ()) -> Recipe | TextRecipe:
    """Return a recipe, by its name or file, with `section.key=value` assigned.

    Raises RequestError if there is no such recipe, or a key or value is wrong, and FileProblem if it cannot be read.
    """
    path = Path(name) if name.endswith(".yaml") else RECIPES / f"{name}.yaml"
    if path.parent == RECIPES and not path.exists():
        raise RequestError(f"recipe {name!r} is not one of {', '.join(list_recipes())}")
    sections = read_settings_file(path)
    schema = TextRecipe if "text_encoders" in sections else _Keys
    overrides = collect_overrides(schema, {}, assignments)
    given = {**read_sections(schema, sections, source=str(path)), **overrides}
    if schema is TextRecipe:
        return validate(TextRecipe, given)
    own = {key.removeprefix("demo."): value for key, value in given.items() if key.startswith("demo.")}
    demo = validate(DemoSettings, own)
    lengths = {length: (1.0, size) for length, (_, size) in demo.scenes.kinds.items()}
    trained = {key: value for key, value in given.items() if not key.startswith("demo.")}
    trained["data.buckets"] = Given({f"{demo.scenes.size}px": lengths}, "demo.scenes")
    settings = validate(TrainSettings, trained, below=model_entry(trained))
    refuse_without_effect(settings, {key: value for key, value in overrides.items() if key in trained})
    return Recipe(settings, demo)
