"""Prompts as the text encoders read them."""

import pytest

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.engine.generate import text


@pytest.mark.parametrize("content", ["", "[]", '{"places": "sea"}', '{"places": [1]}', '{"places": '])
def test_a_broken_vocabulary_is_named(tmp_path, content):
    (tmp_path / "vocabulary.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"vocabulary\.json is broken"):
        text.read_vocabulary(tmp_path)
