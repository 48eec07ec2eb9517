"""When training saves checkpoints, and which it keeps."""

from pydantic import Field, PositiveInt

from opensora_cli.settings.base import Section


class CheckpointSettings(Section):
    """When to save, and what to keep. An interruption and the end of a run are saved in any case."""

    every: PositiveInt = Field(default=200, le=10**9, description="updates between two checkpoints")
    keep: PositiveInt = Field(default=3, le=10**9, description="newest checkpoints that are kept")
    keep_best: bool = Field(
        default=True,
        description="keep the best one, too: that with the lowest validation loss or, without validation, the lowest "
        "mean training loss since the checkpoint before",
    )
