"""Resolving of requests."""

import pytest
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import RequestError
from opensora_cli.engine.generate import request as requests
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import generate_request


def test_a_request_that_no_model_allows_is_refused_before_torch_chooses_one(monkeypatch):
    def choose_model(*_, loading, **__):
        with loading():
            raise AssertionError("torch was asked")

    monkeypatch.setattr(requests, "choose_model", choose_model)
    typed = {"prompt": Given("sea", "PROMPT")}
    wrong = generate_request({**typed, "runtime.device": Given("gpu", "--device")}, environment={})
    with pytest.raises(RequestError, match=r"runtime\.device=gpu must be .* \(from --device\)"):
        requests.resolve(wrong, reporter=RecordingReporter())
    large = generate_request({**typed, "video.resolution": Given("768px", "--res")}, environment={})
    with pytest.raises(AssertionError, match="torch was asked"):
        requests.resolve(large, reporter=RecordingReporter())
