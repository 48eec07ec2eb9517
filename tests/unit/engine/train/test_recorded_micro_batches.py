"""A resumed run keeps the number of micro-batches of its updates, if its ranks can share them."""

import json

import pytest
import tiny_training
from toy_training import Listener

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.train.resuming import with_recorded_micro_batches


def test_ranks_that_cannot_share_the_recorded_number_need_another(tmp_path):
    states = {"global_step": 2, "skipped_in_a_row": 0, "micro_batches": 3}
    (tmp_path / "running_states.json").write_text(json.dumps(states))
    settings, listener = tiny_training.vae_settings(tmp_path / "run"), Listener()
    with pytest.raises(RequestError, match="2 data-parallel ranks cannot share") as caught:
        with_recorded_micro_batches(settings, tmp_path, data_ranks=2, reporter=listener)
    assert "--set loop.micro_batches=4" in caught.value.hint
    larger = settings.replace({"loop.micro_batches": 4})
    assert with_recorded_micro_batches(larger, tmp_path, data_ranks=2, reporter=listener) == larger
    assert listener.warnings == ["an update has 4 micro-batches from now on, instead of 3"]
