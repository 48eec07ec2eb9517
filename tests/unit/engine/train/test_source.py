"""Training on the clips of a program: `train(settings, source=...)`."""

from pathlib import Path

import pytest
import tiny_frozen
import tiny_training
from tiny_source import Colors

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.train.run import train
from opensora_cli.settings.train import TrainSettings


def vae_settings(output: Path, **changes: object) -> TrainSettings:
    return tiny_training.vae_settings(output).replace({"data.table": None, "checkpoints.every": 2, **changes})


@pytest.mark.slow
def test_a_cache_has_the_same_losses(tmp_path: Path) -> None:
    frozen = tiny_frozen.save_frozen_parts(tmp_path / "frozen")
    for name, cache in (("fresh", None), ("cached", str(tmp_path / "cache"))):
        settings = tiny_training.mmdit_settings(tmp_path / name, frozen)
        changes = {"data.table": None, "train_mmdit.cache": cache, "loop.steps": 3}
        train(settings.replace(changes), source=Colors(num_frames=13))
    assert tiny_training.losses(tmp_path / "fresh") == tiny_training.losses(tmp_path / "cached")


def test_what_contradicts_a_source_is_refused(tmp_path: Path) -> None:
    settings, source = vae_settings(tmp_path / "run"), Colors()
    for changes, given, message in (
        ({}, {}, r"data\.table is not set"),
        (
            {"data.table": "clips.csv"},
            {"source": source},
            r"data\.table=clips\.csv does not go with",
        ),
        ({"validation.every": 1}, {"source": source}, r"validation\.every=1 needs held-out clips"),
        ({"parallel.gpus": 2, "device": "cpu"}, {"source": source}, r"parallel\.gpus=2 starts no ranks for the clips"),
        ({}, {"source": source, "token_weights": len}, "token_weights does not go with target=vae"),
    ):
        with pytest.raises(RequestError, match=message):
            train(settings.replace(changes), **given)
    masked = tiny_training.mmdit_settings(tmp_path / "run").replace(
        {"data.table": None, "train_mmdit.masked_loss": True}
    )
    with pytest.raises(RequestError, match="masked_loss=true does not go with token_weights"):
        train(masked, source=source, token_weights=len)
    assert not (tmp_path / "run").exists()
