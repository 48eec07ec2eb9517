import sys

import pytest

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.media.plots import new_figure, write_figure

STARTS = {"png": b"\x89PNG", "svg": b"<?xml"}


def write_line(path, **options):
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([1, 2, 4], [3, 1, 2], label="bandwidth")
    axes.legend()
    write_figure(figure, path, **options)


@pytest.mark.parametrize("format_", ["png", "svg"])
def test_the_ending_gives_the_format(tmp_path, format_):
    path = tmp_path / "new" / f"a.{format_.upper()}"
    write_line(path)
    assert path.read_bytes().startswith(STARTS[format_])


def test_a_missing_matplotlib_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(HardwareError) as caught:
        new_figure()
    assert caught.value.hint == "in osora's checkout: pip install -c constraints.txt '.[plot]'"
