import sys

import pytest

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.media.plots import new_figure, write_figure

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def write_line(path, **options):
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([1, 2, 4], [3, 1, 2], label="bandwidth")
    axes.legend()
    write_figure(figure, path, **options)


@pytest.mark.parametrize("format_", [pytest.param("pdf", marks=pytest.mark.slow), "png", "svg"])
def test_equal_data_give_equal_bytes_in_the_format_of_the_ending(tmp_path, format_):
    first, second = tmp_path / f"a.{format_.upper()}", tmp_path / "new" / f"b.{format_}"
    write_line(first)
    write_line(second)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(STARTS[format_])


def test_a_missing_matplotlib_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(HardwareError) as caught:
        new_figure()
    assert caught.value.hint == "in osora's checkout: pip install -c constraints.txt '.[plot]'"
