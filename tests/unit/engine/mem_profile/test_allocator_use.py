from opensora_cli.engine.mem_profile.measured_stages import Measured, allocator_use
from opensora_cli.memory.counting import TensorBytes


def measured(allocated: int, reserved: int) -> Measured:
    return Measured(allocated, TensorBytes(), reserved, allocated)


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
