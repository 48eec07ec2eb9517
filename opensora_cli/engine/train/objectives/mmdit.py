"""Objective `mmdit`: flow matching of the transformer, in all condition modes."""

from typing import TYPE_CHECKING, Any

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.train.objectives.base import TransformerObjective
from opensora_cli.settings.train import TrainSettings

if TYPE_CHECKING:
    from opensora_cli.engine.encode.clip_cache import ClipCache
    from opensora_cli.engine.train.distribution import Distribution
    from opensora_cli.engine.train.objectives.flow_matching import TokenWeights
    from opensora_cli.engine.train.objectives.task import Task


class FlowMatching(TransformerObjective):
    """Mean squared error of the velocity."""

    def build(
        self,
        settings: TrainSettings,
        *,
        distribution: "Distribution",
        clips: "ClipCache | None",
        token_weights: "TokenWeights | None",
        reporter: Reporter,
    ) -> "Task[Any]":
        from opensora_cli.engine.train.objectives.flow_matching import build_mmdit_task
        from opensora_cli.engine.train.transformer import build_transformer

        transformer = build_transformer(settings, distribution=distribution, reporter=reporter)
        return build_mmdit_task(
            settings, transformer, device=distribution.device, clips=clips, token_weights=token_weights
        )


OBJECTIVE = FlowMatching()
