"""Tables of settings that need each other, or do not go together."""

from typing import Any

import pytest
from pydantic import ValidationError

from opensora_cli.core.section import Section, nested
from opensora_cli.settings import generate, train
from opensora_cli.settings.applies import Pair
from opensora_cli.settings.explain import explain
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.train import TrainSettings

SET: dict[str, Any] = {
    "init": "demo",
    "lora.rank": 4,
    "lora.dropout": 0.5,
    "data.table": "clips.csv",
    "parallel.devices": "0,1",
    "samples.every": 5,
    "validation.every": 5,
    "validation.table": "others.csv",
    "resume": "a.latents.safetensors",
    "from_latents": "b.latents.safetensors",
    "prompts_at": "2s=snow",
    "video.extend": 2,
    "sampling.stop_at": 5,
    "draft.resolution": "256px",
    "watching.profile_steps": (1, 1),
    "condition.references": "a.png",
    "sampling.step_cache": 0.2,
    "num_inference_steps": 1,
}
"""Value of a setting that is not a switch."""
OTHER: dict[str, Any] = {
    "strategy": "zero2",
    "optimizer.name": "muon",
    "precision.compute": "bf16",
    "vae.kind": "dc_ae",
    "memory.checkpoint_double_blocks": 1,
    "memory.checkpoint_single_blocks": 1,
    "memory.checkpointing": "full",
    "runtime.device": "cpu",
    "condition.continued": 0,
}
"""Value beside the one that a condition names."""


def holding(condition: str) -> dict[str, Any]:
    """Return settings with which a condition holds."""
    if "!=" in condition:
        key = condition.partition("!=")[0]
        return {key: OTHER[key]}
    if ">" in condition:
        return {condition.partition(">")[0]: 2, "parallel.gpus": 2}
    key, sign, value = condition.partition("=")
    return {key: value if sign else SET.get(key, True)}


def problems(schema: type[Section], values: dict[str, Any]) -> list[str]:
    try:
        schema.model_validate(nested(values))
    except ValidationError as error:
        return explain(error)
    return []


def base(schema: type[Section], rule: Pair) -> dict[str, Any]:
    if schema is GenerateSettings:
        return {"prompt": "sea"}
    return {"target": "vae" if rule.only == "trains_transformer!=true" else "mmdit"} | (
        {} if not rule.only or rule.only.startswith("trains_transformer") else holding(rule.only)
    )


@pytest.mark.parametrize(
    ("schema", "rule"),
    [*((TrainSettings, rule) for rule in train._NEEDS), *((GenerateSettings, rule) for rule in generate._NEEDS)],
    ids=str,
)
def test_a_setting_needs_another(schema: type[Section], rule: Pair) -> None:
    without = {"output.save_latents": False} if rule.second == "output.save_latents" else {}
    found = problems(schema, {**base(schema, rule), **without, **holding(rule.first)})
    assert any(f" needs {rule.second}: {rule.fix}" in problem for problem in found), found


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        *((TrainSettings, rule) for rule in train._CONFLICTS),
        *((GenerateSettings, rule) for rule in generate._CONFLICTS),
    ],
    ids=str,
)
def test_two_settings_do_not_go_together(schema: type[Section], rule: Pair) -> None:
    [named] = [key for key in holding(rule.first) if key != "parallel.gpus"]
    found = problems(schema, {**base(schema, rule), **holding(rule.first), **holding(rule.second)})
    assert any(problem.startswith(f"{named}=") and problem.endswith(f": {rule.fix}") for problem in found), found


def test_a_rule_has_a_condition() -> None:
    assert problems(TrainSettings, {"target": "mmdit", "data.table": "clips.csv"}) == []
