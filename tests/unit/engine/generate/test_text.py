"""The text stage: what does not fit together is refused before it meets the transformer."""

from dataclasses import replace

import pytest
from tiny_world import demo_settings

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate import text
from opensora_cli.engine.generate.loaded import LoadedModels
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.stages import RunRecord


def test_an_encoder_of_another_width_is_refused(world, tmp_path, reporter):
    plan = make_plan(demo_settings(world, tmp_path))
    plan = replace(plan, settings=plan.settings.replace({"model.vec_in_dim": 24}))
    with pytest.raises(CheckpointError) as caught:
        text.encode_text(plan, LoadedModels(), RunRecord(reporter))
    folder = plan.weights.path(Component.CLIP)
    assert caught.value.message == f"{folder} encodes to 16 numbers, and the transformer reads model.vec_in_dim=24"


@pytest.mark.parametrize("content", ["", "[]", '{"places": "sea"}', '{"places": [1]}', '{"places": '])
def test_a_broken_vocabulary_is_named(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"vocabulary\.json is broken"):
        text.read_vocabulary(tmp_path)
