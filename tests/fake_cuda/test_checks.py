"""Faults that checks find in logs written by hand. Faults of streams and copies are planted in `test_training.py`."""

import torch
from fake_cuda.checks import collective_faults, device_faults, dtype_faults, memory_faults
from fake_cuda.log import MAIN, Allocated, Collective, Log, Operand, Operation, Stage

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HERE = (MAIN, "x.py:1")


def operand(dtype=torch.bfloat16, device=CUDA):
    return Operand(0, device, dtype, (2,), 0, 4, is_pinned=False)


def log_of_product(*reads):
    return Log(0, [Operation(*HERE, "mm", "cuda:0/0", reads, (operand(),))])


def test_a_product_of_two_dtypes():
    assert list(dtype_faults(log_of_product(operand(), operand()))) == []
    [fault] = dtype_faults(log_of_product(operand(), operand(torch.float32)))
    assert "mm of bfloat16, float32" in fault.replace("torch.", "")


def test_a_tensor_of_the_host_or_of_another_gpu_among_those_of_the_rank():
    assert list(device_faults(log_of_product(operand()), CUDA)) == []
    [of_host] = device_faults(log_of_product(operand(device=CPU)), CUDA)
    [of_other] = device_faults(log_of_product(operand(device=torch.device("cuda", 1))), CUDA)
    assert "between cpu, cuda" in of_host
    assert "and this rank has cuda:0" in of_other


def test_memory_that_is_not_planned():
    stage = [Stage(*HERE, "decode", what) for what in ("began", "ended")]
    log = Log(0, [stage[0], Allocated(*HERE, 0, CUDA, 1000, "cuda:0/0"), stage[1]])
    assert list(memory_faults(log, {"decode": 950})) == []
    assert "are planned" in next(memory_faults(log, {"decode": 800}))
    assert "are planned" in next(memory_faults(log, {"decode": 1200}))


def test_a_collective_that_one_rank_leaves_out_or_calls_with_another_size():
    def called(size):
        tensors = (operand(),)
        return [Collective(*HERE, "allreduce", "gloo", tensors, tensors, None, (0, 1), 0, None, (size,), (size,))]

    assert list(collective_faults({0: Log(0, called(2)), 1: Log(1, called(2))})) == []
    assert "call {0: 1, 1: 0} collectives" in next(collective_faults({0: Log(0, called(2)), 1: Log(1)}))
    assert "elements" in next(collective_faults({0: Log(0, called(2)), 1: Log(1, called(3))}))
