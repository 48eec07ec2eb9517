"""A resumed run keeps the number of micro-batches of its updates, if its ranks can share them."""

import pytest
import tiny_training
from toy_training import Listener

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.train.state import with_recorded_micro_batches


def test_ranks_that_cannot_share_the_recorded_number_need_another(tmp_path):
    settings, listener = tiny_training.vae_settings(tmp_path), Listener()
    with pytest.raises(RequestError, match="2 data-parallel ranks cannot share") as caught:
        with_recorded_micro_batches(settings, 3, data_ranks=2, reporter=listener)
    assert "--set loop.micro_batches=4" in caught.value.hint
    larger = settings.replace({"loop.micro_batches": 4})
    assert with_recorded_micro_batches(larger, 3, data_ranks=2, reporter=listener) == larger
    assert listener.warnings == ["an update has 4 micro-batches from now on, instead of 3"]
