import io
import json
from pathlib import Path

import pytest
import torch

from opensora_cli.engine.mem_profile import allocator_use as allocator
from opensora_cli.engine.mem_profile.allocator_use import allocator_use
from opensora_cli.engine.mem_profile.measured_stages import Measured
from opensora_cli.memory.counting import TensorBytes
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.explain import Given
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import GenerateRequest, load_generate_settings


def measured(allocated: int, reserved: int) -> Measured:
    return Measured(allocated, TensorBytes(), reserved, allocated)


@pytest.fixture
def settings() -> GenerateSettings:
    values = {"prompt": "sea", "runtime.device": "cpu", "video.num_frames": "1"}
    given = {key: Given(value, "test") for key, value in values.items()}
    return load_generate_settings(GenerateRequest(overrides=given), model=DEMO)


def test_the_stage_that_reserved_most_is_reported():
    use = allocator_use([measured(9, 10), measured(30, 50), measured(10, 20)])
    assert use is not None
    assert (use.allocated_bytes, use.reserved_bytes) == (30, 50)
    assert "40% is reserved and unused: try PYTORCH_ALLOC_CONF=" in use.advice
    fine = allocator_use([measured(9, 10)])
    assert fine is not None
    assert "nothing to fix" in fine.advice


def test_nothing_reserved_gives_no_allocator_use():
    assert allocator_use([]) is None
    assert allocator_use([measured(0, 0)]) is None


def test_the_process_denoises_what_it_is_given(
    settings: GenerateSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO(settings.model_dump_json()))
    monkeypatch.setattr(allocator, "peak_reserved_bytes", lambda device: 7)
    allocator._main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["reserved_bytes"] == 7
    assert figures["seconds"] > 0


@pytest.mark.parametrize(("line", "reason"), [("device=cuda is not there", "device=cuda is not there"), ("", "code 4")])
def test_a_failing_process_gives_its_last_line_or_code(
    line: str, reason: str, settings: GenerateSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho 'Traceback' >&2\necho '{line}' >&2\nexit 4\n" if line else "#!/bin/sh\nexit 4\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    found = allocator._in_a_process(settings, allocator.CHOICES[0])
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would not fail")
def test_a_failing_process_gives_its_reason(settings: GenerateSettings):
    reason = allocator._in_a_process(settings.replace({"runtime.device": "cuda"}), allocator.CHOICES[0])
    assert isinstance(reason, str)
    assert "device=cuda is not there" in reason
