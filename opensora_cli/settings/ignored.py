"""Which settings of a training have no effect beside the others."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from opensora_cli.settings.base import Section
from opensora_cli.settings.train_loop import OptimizerName

if TYPE_CHECKING:
    from opensora_cli.settings.train import TrainSettings


class Ignored(NamedTuple):
    """A setting without effect."""

    key: str
    """Or what the keys of several begin with."""
    beside: str
    """The setting that makes it so."""
    hint: str


_OF_ALL_TARGETS = frozenset(
    {"target", "output", "device", "threads", "optimizer", "precision", "loop", "checkpoints", "parallel", "strategy"}
    | {"watching", "validation"}
)
_OF_TARGET = {
    "vae": _OF_ALL_TARGETS | {"init", "data", "vae", "train_vae"},
    "text": _OF_ALL_TARGETS | {"text"},
    "mmdit": _OF_ALL_TARGETS
    | {"init", "weights", "data", "model", "vae", "text", "train_mmdit", "lora", "memory", "compile", "samples"},
}


def ignored_settings(settings: "TrainSettings") -> Iterator[Ignored]:
    """Yield the settings that nothing asks for in such a run."""
    target, data = settings.target, settings.data
    of_target = _OF_TARGET[target]
    for section in type(settings).model_fields:
        if section not in of_target:
            yield Ignored(section, f"target={target}", f"these have: {', '.join(sorted(of_target))}")
    if target == "mmdit":
        yield Ignored("text.batch_size", "target=mmdit", "its micro-batches are as large as those of clips")
    else:
        yield Ignored("watching.peak_tflops", f"target={target}", "operations are counted for target=mmdit alone")
    if data.table is not None:
        hint = "leave data.table out to train on procedural scenes"
        yield Ignored("data.scenes", f"data.table={data.table}", hint)
    else:
        for key in ("data.buckets", "data.fps_max", "data.fit"):
            yield Ignored(key, "data.table=none", "name a table: data.table=FILE")
        yield from _while_off(
            "data.scenes.picture_share", data.scenes.picture_share, ["data.scenes.picture_batch_size"]
        )
    yield from _while_off("data.workers", data.workers, ["data.prefetch"])
    if settings.optimizer.name is not OptimizerName.MUON:
        yield Ignored("optimizer.muon_learning_rate", f"optimizer.name={settings.optimizer.name}", "use muon")
    objective = settings.train_vae
    yield from _while_off("train_vae.picture_steps", objective.picture_steps, ["train_vae.picture_batch_size"])
    yield from _while_off("train_vae.crop_size", objective.crop_size, ["train_vae.whole_steps"])
    adversary = objective.discriminator
    others = _others("train_vae.discriminator", adversary, but="weight")
    yield from _while_off("train_vae.discriminator.weight", adversary.weight, others)
    for name, watched in (("validation", settings.validation), ("samples", settings.samples)):
        yield from _while_off(f"{name}.every", watched.every, _others(name, watched, but="every"))


def _others(name: str, section: Section, *, but: str) -> list[str]:
    return [f"{name}.{field}" for field in type(section).model_fields if field != but]


def _while_off(switch: str, value: float | None, keys: list[str]) -> Iterator[Ignored]:
    if not value:
        shown = "none" if value is None else f"{value:g}"
        yield from (Ignored(key, f"{switch}={shown}", f"give {switch}, too") for key in keys)
