"""Facts about the installation, the weights and the presets of this machine."""

from opensora_cli.engine.env_check import facts

GIB = 2**30


def test_what_osora_requires(monkeypatch):
    requires = ["torch>=2.10", "numpy>=99", "no-such-package>=1", "peft; extra == 'train'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    unmet = facts.read_python().unmet
    assert len(unmet) == 2
    assert unmet[0].endswith("does not fit >=99")
    assert unmet[1] == "no-such-package is not installed"


def test_weights_go_to_the_folder_that_is_named(tmp_path):
    weights = facts.read_weights({"OSORA_WEIGHTS": str(tmp_path / "not" / "yet")})
    assert weights.folder == str(tmp_path / "not" / "yet")
    assert weights.missing == ("transformer", "vae", "t5", "clip")
    assert weights.missing_bytes > weights.largest_bytes > 20 * GIB
    assert weights.free_disk_bytes > 0


def test_presets_find_weights_where_the_environment_says():
    assert facts.preset_here("768px", {"OSORA_WEIGHTS": "/w"}).runtime.weights == "/w"
    assert facts.preset_here("768px", {"OSORA_RUNTIME__WEIGHTS": "/w", "OSORA_WEIGHTS": ""}).runtime.weights == "/w"
    assert facts.preset_here("768px", {}).runtime.weights is None


def test_libraries_before_those_of_torch_are_found(tmp_path):
    (tmp_path / "libcudnn.so.8").touch()
    (tmp_path / "libz.so").touch()
    paths = f"{tmp_path}::{tmp_path / 'gone'}"
    assert facts.read_shadowing({"LD_LIBRARY_PATH": paths}) == (str(tmp_path / "libcudnn.so.8"),)
