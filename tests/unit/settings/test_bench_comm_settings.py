"""Settings of `osora bench-comm`."""

import pytest

from opensora_cli.core.exceptions import RequestError
from opensora_cli.settings.explain import Given
from opensora_cli.settings.layers import validate
from opensora_cli.settings.tools import BenchCommSettings, Collective


def _settings(**values: object) -> BenchCommSettings:
    return validate(BenchCommSettings, {key.replace("__", "."): Given(value, key) for key, value in values.items()})


def test_defaults_are_8_bytes_to_1_gib_on_gpus() -> None:
    settings = _settings()
    assert settings.min_bytes == 8
    assert settings.largest_bytes(on_gpu=True) == 2**30
    assert settings.largest_bytes(on_gpu=False) == 4 * 2**20
    assert settings.collectives == tuple(Collective)
    assert _settings(max_bytes="1GiB").largest_bytes(on_gpu=False) == 2**30
    assert _settings(min_bytes="8MiB").largest_bytes(on_gpu=False) == 8 * 2**20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_bytes": "1KiB", "max_bytes": "8"}, "min_bytes=1024 is over max_bytes=8"),
        ({"max_bytes": "3TiB"}, "max_bytes="),
        ({"warmup": 1}, "warmup=1 must be at least 2"),
        ({"parallel__gpus": 1}, "gpus=1 must be at least 2"),
        ({"parallel__gpus": 4, "parallel__ulysses_degree": 2}, "parallel.ulysses_degree has no effect here"),
        ({"plot": "links.html"}, "plot=links.html must end in .png, .svg or .pdf"),
        ({"collectives": "all_reduse"}, "did you mean all_reduce"),
    ],
)
def test_wrong_requests(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as failure:
        _settings(**values)
    assert message in failure.value.message
