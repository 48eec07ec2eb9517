"""Every objective of training on real ranks against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_autoencoders import UNCLIPPED, mixed_batches, vae_task, vae_trainer
from tiny_distillation import settings_of
from tiny_strategies import (
    LATENT_TOKENS,
    OPTIMIZER,
    Case,
    VelocityTask,
    assert_near,
    micro_batch,
    numbered_trainer,
    open_case,
    tiny_transformer,
    whole_weights,
)
from torch import Tensor

from opensora_cli.core.conditions import CONDITION_MODES
from opensora_cli.data.batches import SampleRng
from opensora_cli.engine.encode.clips import EmptyPrompt, Encoders
from opensora_cli.engine.train.lora import add_lora
from opensora_cli.engine.train.objectives.distill import DistillTask
from opensora_cli.engine.train.objectives.dmd import DMDTask
from opensora_cli.engine.train.objectives.mmdit import MMDiTTask, PreparedClips
from opensora_cli.engine.train.trainer import Trainer
from opensora_cli.sampling.packing import position_ids
from opensora_cli.settings.train_sections import LoraSettings

ZERO3 = Case("zero3", 2)
ULYSSES, RING = (Case("hybrid", 2, ((axis, 2),)) for axis in ("ulysses_degree", "ring_degree"))


class _RandomTokens(MMDiTTask):
    """Micro-batches of random tokens, with another condition mode in each."""

    def prepare(self, batch: Any, rng: SampleRng) -> PreparedClips:
        given, noise_BND = micro_batch(self.module, batch.number)
        count, mode = len(noise_BND), ("t2v", "i2v_head", "v2v_tail")[batch.number % 3]
        return PreparedClips(
            data_BND=given["packed_latents_BND"],
            noise_BND=noise_BND,
            normal_B=torch.zeros(count),
            modes=[CONDITION_MODES[mode]] * count,
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


def _no_encoders() -> Encoders:
    raise AssertionError("there are no pixels to encode")


def _trainer(objective: str, case: Case | None) -> Trainer:
    distribution = open_case(case)
    if objective in ("hunyuan", "dc_ae"):
        # With the usual eps, AdamW's first steps would turn the sign of even the smallest gradient into a full step.
        optimizer = UNCLIPPED.replace({"eps": 1e-3})
        discriminator = {"weight": 0.05, "width": 8, "layers": 2, "start_step": 1, "learning_rate": 1e-3}
        weights = {"squared_error_weight": 1.0, "single_frame_share": 0.3}
        vae = vae_task(objective, optimizer=optimizer, discriminator=discriminator, **weights)
        vae.shard(distribution)
        batches = mixed_batches(objective, rank=distribution.data_rank, ranks=distribution.data_ranks)
        return vae_trainer(vae, batches, steps=3, micro_batches=2, optimizer=optimizer, distribution=distribution)
    model = tiny_transformer()
    if "adapter" in objective:
        add_lora(model, LoraSettings(rank=3, alpha=12.0, dropout=0.2 if "dropout" in objective else 0.0), seed=0)
        task: Any = VelocityTask(model)
    else:
        add_lora(model, LoraSettings(rank=3), seed=0, has_critic=objective == "dmd")
        given, _ = micro_batch(model, 1_000)
        empty = EmptyPrompt(given["prompt_embeds_BLC"][0], given["pooled_prompt_embeds_BV"][0])
        kind = {"distill": _Distill, "dmd": _DMD}[objective]
        options = {"image_guidance_scale": 2.0, "critic_learning_rate": 0.01}
        changes = {f"train_distill__{name}": value for name, value in options.items()}
        settings = settings_of(Path("unused"), target="dmd", **changes)
        task = kind(model, settings, empty_prompt=empty, encoders=_no_encoders)
    optimizer = OPTIMIZER.replace({"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 1.0})
    return numbered_trainer(task, distribution, optimizer=optimizer, micro_batches=4, trained_only=True)


def _trained(objective: str, case: Case | None) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    trainer = _trainer(objective, case)
    figures = [dict(trainer.do_step().figures) for _ in range(3)]
    trained = {name: weight for learner in trainer.learners.values() for name, weight in learner.weights.items()}
    return figures, whole_weights(trainer, trained)


@pytest.mark.parametrize(
    ("objective", "case", "tolerance"),
    [
        ("hunyuan", Case("ddp", 2), 1e-4),
        ("dc_ae", Case("ddp", 2), 1e-4),
        ("adapter with dropout", ZERO3, 1e-3),
        ("dmd", ZERO3, 1e-3),
        pytest.param("adapter", ULYSSES, 1e-3, marks=pytest.mark.slow),
        pytest.param("adapter with dropout", Case("zero2", 2), 1e-3, marks=pytest.mark.slow),
        pytest.param("distill", ZERO3, 1e-3, marks=pytest.mark.slow),
        *(pytest.param("dmd", case, 1e-3, marks=pytest.mark.slow) for case in (ULYSSES, RING, Case("ddp", 2))),
    ],
    ids=str,
)
def test_ranks_train_every_objective_as_one_process(pool, objective, case, tolerance):
    figures, weights = _trained(objective, None)
    if objective == "dmd":
        assert ["loss" in each for each in figures] == [True, False, True]
    for our_figures, ours in (answers := pool(case.ranks).run(_trained, objective, case)):
        assert our_figures == answers[0][0]
        for found, expected in zip(our_figures, figures, strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert_near(ours, weights, tolerance)
