"""Few-step adapters learned by ranks that share weights or tokens, against one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_strategies import LATENT_TOKENS, Case, micro_batch, tiny_transformer, train_task
from torch import Tensor

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.encode.encoders import EmptyPrompt, Encoders
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.distill import DistillTask
from opensora_cli.engine.train.objectives.dmd import DMDTask
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask, PreparedClips
from opensora_cli.sampling.packing import position_ids
from opensora_cli.settings.explain import Given
from opensora_cli.settings.train import TrainSettings, load_train_settings
from opensora_cli.settings.train_loop import LoraSettings

MODES = ("t2v", "i2v_head", "v2v_tail")


class _RandomTokens(MMDiTTask):
    """Micro-batches of random tokens, with another condition mode in each."""

    def prepare(self, batch: Any, rng: SampleRng) -> PreparedClips:
        given, noise_BND = micro_batch(self.module, batch.number)
        count = len(noise_BND)
        return PreparedClips(
            data_BND=given["packed_latents_BND"],
            noise_BND=noise_BND,
            normal_B=torch.zeros(count),
            modes=[CONDITION_MODES[MODES[batch.number % len(MODES)]]] * count,
            mask_B1THW=None,
            inputs={
                "position_ids_BN3": position_ids(count, LATENT_TOKENS, 1, 1, device=torch.device("cpu")),
                "prompt_embeds_BLC": given["prompt_embeds_BLC"],
                "pooled_prompt_embeds_BV": given["pooled_prompt_embeds_BV"],
                "conditioning_BNK": given.get("conditioning_BNK"),
                "embedded_guidance_B": given.get("embedded_guidance_B"),
            },
            grid=(LATENT_TOKENS, 1, 1),
        )

    def tokens(self, batch: Any) -> int:
        return 1


class _Distill(_RandomTokens, DistillTask):
    pass


class _DMD(_RandomTokens, DMDTask):
    pass


def _settings() -> TrainSettings:
    given = {
        "target": "dmd",
        "data.table": "clips.csv",
        "train_distill.steps": 2,
        "train_distill.teacher_steps": 2,
        "train_distill.image_guidance_scale": 2.0,
        "train_distill.critic_learning_rate": 0.01,
    }
    overrides = {key: Given(value, "test") for key, value in given.items()}
    return load_train_settings(config=Path("demo_distill"), overrides=overrides, environment={})


def _no_encoders() -> Encoders:
    raise AssertionError("there are no pixels to encode")


def _distilled(kind: type[DistillTask], case: Case | None) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    distribution = case.open() if case else Distribution(torch.device("cpu"))
    model = tiny_transformer()
    add_lora(model, LoraSettings(rank=3), seed=0, has_critic=issubclass(kind, DMDTask))
    given, _ = micro_batch(model, 1_000)
    empty = EmptyPrompt(given["prompt_embeds_BLC"][0], given["pooled_prompt_embeds_BV"][0])
    task = kind(model, _settings(), empty_prompt=empty, encoders=_no_encoders)
    task.shard(distribution)
    return train_task(task, distribution, steps=3)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (_DMD, Case("zero3", 2)),
        pytest.param(_Distill, Case("zero3", 2), marks=pytest.mark.slow),
        pytest.param(_DMD, Case("hybrid", 2, (("ulysses_degree", 2),)), marks=pytest.mark.slow),
        pytest.param(_DMD, Case("ddp", 2), marks=pytest.mark.slow),
        pytest.param(_DMD, Case("hybrid", 2, (("ring_degree", 2),)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_learn_the_adapters_of_one_process(
    pool: Callable[[int], Any], kind: type[DistillTask], case: Case
) -> None:
    figures, adapters = _distilled(kind, None)
    assert ["loss" in each for each in figures] == [True, not issubclass(kind, DMDTask), True]
    for our_figures, ours in pool(case.ranks).run(_distilled, kind, case):
        for found, expected in zip(our_figures, figures, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert ours.keys() == adapters.keys()
        assert all(torch.allclose(ours[name], value, rtol=0, atol=1e-3) for name, value in adapters.items())
