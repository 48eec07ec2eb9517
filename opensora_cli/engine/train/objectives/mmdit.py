"""Objective `mmdit`: flow matching of the transformer, or of an adapter for it, in all condition modes."""

from pathlib import Path
from typing import TYPE_CHECKING

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.encode import inputs
from opensora_cli.engine.train.objectives.base import LORA_FOLDER, TRANSFORMER_FILE, Objective
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from opensora_cli.engine.encode.clip_cache import ClipCache
    from opensora_cli.engine.train.activations import BatchShape
    from opensora_cli.engine.train.distribution import Distribution
    from opensora_cli.engine.train.objectives.flow_matching import TokenWeights
    from opensora_cli.engine.train.trainer import Task


class FlowMatching(Objective):
    """Mean squared error of the velocity, on encoded clips and captions."""

    weights_file = TRANSFORMER_FILE

    def exports(self, settings: TrainSettings) -> tuple[str, ...]:
        return (LORA_FOLDER,) if settings.lora.is_on else (self.weights_file,)

    def frozen_parts(self, settings: TrainSettings) -> dict[str, Path | None]:
        return inputs.find_frozen_parts(settings)

    def require_frozen(self, settings: TrainSettings) -> None:
        inputs.require_frozen_parts(settings)

    def layer_values(self, settings: TrainSettings, shape: "BatchShape") -> int:
        frames, rows, columns = shape.token_grid(settings)
        tokens = frames * rows * columns + settings.text.t5_max_length
        return shape.batch_size * tokens * settings.model.hidden_size

    def stand_in(self, settings: TrainSettings) -> "tuple[Task, list[nn.Module]]":
        from opensora_cli.engine.train.build import transformer_task

        return transformer_task(settings)

    def outline(self, settings: TrainSettings) -> "nn.Module":
        from opensora_cli.engine.train.transformer import empty_transformer

        return empty_transformer(settings)

    def build(
        self,
        settings: TrainSettings,
        *,
        distribution: "Distribution",
        clips: "ClipCache | None",
        token_weights: "TokenWeights | None",
        reporter: Reporter,
    ) -> "Task":
        from opensora_cli.engine.train.objectives.flow_matching import build_mmdit_task
        from opensora_cli.engine.train.transformer import build_transformer

        transformer = build_transformer(settings, distribution=distribution)
        return build_mmdit_task(
            settings, transformer, device=distribution.device, clips=clips, token_weights=token_weights
        )


OBJECTIVE = FlowMatching()
