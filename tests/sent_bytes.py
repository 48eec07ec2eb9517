"""Counter of the bytes that this rank sends: every collective of torch passes the dispatcher."""

import torch.distributed as dist

from opensora_cli.memory.counting import DispatchMode
from opensora_cli.parallel.shares import shares


class counted_bytes(DispatchMode):  # noqa: N801  # read as a function
    """Count bytes inside the block, forward and backward, for algorithms that send as little as possible.

    An all-reduce is counted as a ring's: 2(n-1) parts of n. Summed over all ranks of a group, counts are exact.
    """

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.num_bytes += _sent(func._opname, args)
        return func(*args, **(kwargs or {}))


def _sent(name, args):
    match name:
        case "allreduce_":
            group = _group(args[1])
            return sum(shares(2 * (group.size() - 1) * tensor.nbytes, group.size())[group.rank()] for tensor in args[0])
        case "broadcast_":
            group = _group(args[1])
            # Passed on from rank to rank: all but the last send it once.
            return 0 if group.rank() == (args[2] - 1) % group.size() else _bytes(args[0])
        case "_allgather_base_" | "allgather_":
            own = [args[1]] if name == "_allgather_base_" else args[1]
            return _bytes(own) * (_group(args[2]).size() - 1)
        case "_reduce_scatter_base_":
            return args[0].nbytes * (_group(args[2]).size() - 1)
        case "alltoall_base_":
            sent, group, lengths = args[1], _group(args[2]), args[4]
            rows = lengths[group.rank()] if lengths else sent.shape[0] // group.size()
            return sent.nbytes - sent[:rows].nbytes
        case "alltoall_":
            return _bytes(piece for rank, piece in enumerate(args[1]) if rank != _group(args[2]).rank())
        case "send":
            return _bytes(args[0])
    return 0


def _group(boxed):
    return dist.ProcessGroup.unbox(boxed)


def _bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)
