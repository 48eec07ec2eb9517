"""Hardware that is planned for: its files, and what `--on` takes."""

from pathlib import Path

import pytest
import yaml

from opensora_cli.core.exceptions import OsoraError
from opensora_cli.settings.hardware import find_gpu, read_machine


@pytest.mark.parametrize(
    ("given", "name", "count", "gpus", "machines"),
    [
        ("H100", "H100", None, None, None),
        ("8xH100", "H100", 8, 8, 1),
        ("64xh200", "H200", 64, 8, 8),
        ("2x4090", "4090", 2, 2, 1),
        ("RTX 4060 Ti 16GB", "4060Ti-16GB", None, None, None),
        ("2xNVIDIA GeForce RTX 5070 Ti", "5070Ti", 2, 2, 1),
        ("rtx pro 6000 blackwell", "RTX-PRO-6000-Blackwell", None, None, None),
    ],
)
def test_names_and_numbers(given: str, name: str, count: int | None, gpus: int | None, machines: int | None) -> None:
    machine = read_machine(given)
    assert (machine.gpu.name, machine.count) == (name, count)
    counts = {key: value.value for key, value in machine.counts(()).items()}
    assert counts == ({} if count is None else {"parallel.gpus": gpus, "parallel.nnodes": machines})
    assert machine.counts({"parallel.gpus"}) == {}


@pytest.mark.parametrize(("given", "size", "count"), [("12GiB", 12 * 2**30, None), ("2x8gb", 8 * 10**9, 2)])
def test_a_gpu_may_be_named_by_its_memory(given: str, size: int, count: int | None) -> None:
    machine = read_machine(given)
    assert (machine.gpu.memory, machine.count, machine.has_speed) == (size, count, False)
    assert read_machine("4090").has_speed


def test_a_gpu_is_found_by_its_name_in_cuda() -> None:
    assert find_gpu("NVIDIA GeForce RTX 5080") == read_machine("5080").gpu
    assert find_gpu("a GPU of tomorrow") is None


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Its name could be a number of devices.
    Path("2xrig.yaml").write_text("extends: hardware/4090\nname: rig\nmemory: 48GiB\n")
    Path("rig.yaml").write_text("extends: 2xrig.yaml\nproduct_efficiency: 0.25\n")
    assert read_machine("2xrig.yaml").count is None
    machine = read_machine("4xrig.yaml")
    assert (machine.count, machine.gpu.name, machine.gpu.memory) == (4, "rig", 48 * 2**30)
    assert machine.gpu.product_efficiency == 0.25
    assert machine.gpu.bf16_tflops == read_machine("4090").gpu.bf16_tflops


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("H10O", 2, "hardware 'H10O' is not one of 3060, 3090, "),
        ("0xH100", 2, "--on 0xH100 must name 1 to 1024 devices"),
        ("99999999999xH100", 2, "must name 1 to 1024 devices"),
        ("12xH100", 2, "--on 12xH100 fills no whole machines of gpus_per_node=8: use 8 or 16"),
        ("8x", 2, "--on 8x must be NAME, NxNAME, SIZE or a YAML file"),
        ("0.5GiB", 2, "memory=536870912 must be over reserved=1073741824 (from --on 0.5GiB)"),
        ("1..2GB", 2, "memory='1..2GB' is not a size such as 4GB or 4096MiB (from --on 1..2GB)"),
        ("", 2, "must be NAME, NxNAME, SIZE or a YAML file"),
        ("-1xH100", 2, "hardware '-1xH100' is not one of"),
        ("missing.yaml", 3, "missing.yaml"),
    ],
)
def test_what_makes_no_sense_is_refused(given: str, code: int, says: str) -> None:
    with pytest.raises(OsoraError) as raised:
        read_machine(given)
    assert raised.value.exit_code == code
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("given", "meant"),
    [("H10O", "H100"), ("4060 Ti", "4060Ti-16GB"), ("RTX 6000", "RTX-6000-Ada or RTX-PRO-6000-Blackwell")],
)
def test_the_nearest_name_is_named(given: str, meant: str) -> None:
    with pytest.raises(OsoraError) as raised:
        read_machine(given)
    assert raised.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("memory: -3", "memory='-3' is not a size such as 4GB"),
        ("bf16_tflops: 0", "bf16_tflops=0 must be at least 1e-06"),
        ("memory_rate: {attainable_gb_per_s: 2000}", "attainable_gb_per_s=2000 must be at most peak_gb_per_s=1008"),
        ("gpu_memory: 24GiB", "gpu_memory (from rig.yaml) is not a setting"),
    ],
)
def test_nonsense_in_a_file_is_refused(change: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rig.yaml").write_text(f"extends: hardware/4090\n{change}\n")
    with pytest.raises(OsoraError) as raised:
        read_machine("rig.yaml")
    assert raised.value.exit_code == 2
    assert says in raised.value.message
    assert len(raised.value.message.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"device_name": None}, "device_name"),
        ({"memory_rate": None}, "memory_rate.peak_gb_per_s, memory_rate.attainable_gb_per_s"),
        ({"gpu_link": {"peak_gb_per_s": 32}}, "gpu_link.attainable_gb_per_s"),
    ],
)
def test_every_figure_must_be_given(change: dict[str, object], missing: str, tmp_path: Path) -> None:
    path = tmp_path / "rig.yaml"
    figures = read_machine("4090").gpu.model_dump() | change
    path.write_text(yaml.safe_dump({key: value for key, value in figures.items() if value is not None}))
    with pytest.raises(OsoraError) as raised:
        read_machine(str(path))
    assert (raised.value.exit_code, raised.value.message) == (2, f"{path} must give {missing}")
    assert raised.value.hint == "`extends: hardware/H100` takes from that GPU what the file does not give"


def test_more_than_is_named_is_refused() -> None:
    machine = read_machine("2xH100")
    machine.require(device="auto", ranks=2, ranks_per_node=2)
    with pytest.raises(OsoraError, match="has 2 devices, and 4 are asked for"):
        machine.require(device="auto", ranks=4, ranks_per_node=4)
    with pytest.raises(OsoraError, match="the device is cpu"):
        machine.require(device="cpu", ranks=1, ranks_per_node=1)
    with pytest.raises(OsoraError, match="gpus_per_node=8 of H100"):
        read_machine("H100").require(device="auto", ranks=16, ranks_per_node=16)
