"""Tables of settings that need each other, or do not go together."""

from typing import Any

import pytest
from pydantic import ValidationError

from opensora_cli.core.section import Section, nested
from opensora_cli.settings import generate, train
from opensora_cli.settings.applies import Pair
from opensora_cli.settings.explain import explain

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


def problems(schema: type[Section] = train.TrainSettings, **values: Any) -> list[str]:
    try:
        schema.model_validate(nested(values))
    except ValidationError as error:
        return explain(error)
    return []


def base(rule: Pair) -> dict[str, Any]:
    if rule.only.startswith("trains_transformer"):
        return {"target": "vae" if "!=" in rule.only else "mmdit"}
    return {"target": "mmdit", **(holding(rule.only) if rule.only else {})}


@pytest.mark.parametrize("rule", train._NEEDS, ids=lambda rule: f"{rule.first} needs {rule.second}")
def test_a_setting_needs_another(rule: Pair) -> None:
    key = rule.second.partition("=")[0]
    without = {key: OTHER[key]} if key in ("optimizer.name", "precision.compute") else {}
    found = problems(**base(rule), **without, **holding(rule.first))
    assert any(f" needs {rule.second}: {rule.fix}" in problem for problem in found), found


@pytest.mark.parametrize("rule", train._CONFLICTS, ids=lambda rule: f"{rule.first} without {rule.second}")
def test_two_settings_do_not_go_together(rule: Pair) -> None:
    [named] = [key for key in holding(rule.first) if key != "parallel.gpus"]
    found = problems(**{**base(rule), **holding(rule.first), **holding(rule.second)})
    assert any(problem.startswith(f"{named}=") and problem.endswith(f": {rule.fix}") for problem in found), found


@pytest.mark.parametrize("rule", generate._CONFLICTS, ids=lambda rule: f"{rule.first} without {rule.second}")
def test_two_settings_of_a_video_do_not_go_together(rule: Pair) -> None:
    values = {"prompt": "sea", **holding(rule.first), **holding(rule.second)}
    found = problems(generate.GenerateSettings, **values)
    key = rule.first.partition("=")[0]
    assert any(line.startswith(f"{key}=") and line.endswith(f": {rule.fix}") for line in found), found


def test_a_rule_has_a_condition() -> None:
    assert problems(target="mmdit", **{"data.table": "clips.csv"}) == []
