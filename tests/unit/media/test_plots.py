import sys

import pytest

from opensora_cli.core.exceptions import HardwareError
from opensora_cli.media.plots import new_figure, write_figure


def test_the_ending_gives_the_format(tmp_path):
    write_figure(new_figure(), tmp_path / "new" / "a.PNG")
    assert (tmp_path / "new" / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(HardwareError) as caught:
        new_figure()
    assert caught.value.hint == "in osora's checkout: pip install -c constraints.txt '.[plot]'"
