"""Names of `--on`."""

import pytest

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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("H10O", "hardware 'H10O' is not one of 3060, 3090, "),
        ("0xH100", "--on 0xH100 must name 1 to 1024 devices"),
        ("99999999999xH100", "must name 1 to 1024 devices"),
        ("12xH100", "--on 12xH100 fills no whole machines of gpus_per_node=8: use 8 or 16"),
        ("8x", "--on 8x must be NAME, NxNAME or SIZE"),
        ("0.5GiB", "memory=536870912 must be over reserved=1073741824 (from --on 0.5GiB)"),
        ("1..2GB", "memory='1..2GB' is not a size such as 4GB or 4096MiB (from --on 1..2GB)"),
        ("", "must be NAME, NxNAME or SIZE"),
        ("-1xH100", "hardware '-1xH100' is not one of"),
        ("rig.yaml", "hardware 'rig.yaml' is not one of"),
    ],
)
def test_what_makes_no_sense_is_refused(given: str, says: str) -> None:
    with pytest.raises(OsoraError) as raised:
        read_machine(given)
    assert raised.value.exit_code == 2
    assert says in raised.value.message


@pytest.mark.parametrize(
    ("given", "meant"),
    [("H10O", "H100"), ("4060 Ti", "4060Ti-16GB"), ("RTX 6000", "RTX-6000-Ada or RTX-PRO-6000-Blackwell")],
)
def test_the_nearest_name_is_named(given: str, meant: str) -> None:
    with pytest.raises(OsoraError) as raised:
        read_machine(given)
    assert raised.value.hint == f"did you mean {meant}?"


def test_more_than_is_named_is_refused() -> None:
    machine = read_machine("2xH100")
    machine.require(device="auto", ranks=2, ranks_per_node=2)
    with pytest.raises(OsoraError, match="has 2 devices, and 4 are asked for"):
        machine.require(device="auto", ranks=4, ranks_per_node=4)
    with pytest.raises(OsoraError, match="the device is cpu"):
        machine.require(device="cpu", ranks=1, ranks_per_node=1)
    with pytest.raises(OsoraError, match="gpus_per_node=8 of H100"):
        read_machine("H100").require(device="auto", ranks=16, ranks_per_node=16)
