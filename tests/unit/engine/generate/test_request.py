"""Resolving of requests."""

from contextlib import contextmanager

import pytest
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.generate import request as requests
from opensora_cli.settings.explain import Given
from opensora_cli.settings.load import read_request


def test_a_request_that_no_model_allows_is_refused_before_torch_chooses_one(monkeypatch):
    def choose_model(*_, loading, **__):
        with loading():
            raise AssertionError("torch was asked")

    monkeypatch.setattr(requests, "choose_model", choose_model)
    typed = {"prompt": Given("sea", "PROMPT")}
    wrong = read_request(overrides={**typed, "runtime.device": Given("gpu", "--device")}, environment={})
    with pytest.raises(RequestError, match=r"runtime\.device=gpu must be .* \(from --device\)"):
        requests.resolve(wrong, reporter=RecordingReporter())
    large = read_request(overrides={**typed, "video.resolution": Given("768px", "--res")}, environment={})
    with pytest.raises(AssertionError, match="torch was asked"):
        requests.resolve(large, reporter=RecordingReporter())


def test_saved_latents_import_torch_in_the_context_for_it(tmp_path):
    begun = []

    @contextmanager
    def loading():
        begun.append("loading")
        yield

    file = tmp_path / "sea.latents.safetensors"
    file.write_bytes(b"broken")
    request = read_request(overrides={"from_latents": Given(str(file), "--from-latents")}, environment={})
    with pytest.raises(CheckpointError, match="sea"):
        requests.resolve(request, reporter=RecordingReporter(), loading=loading)
    assert begun == ["loading"]
