"""One process of the timed all-reduce: `python all_reduce_worker.py RANK RANKS BACKEND FILE`.

It prints each stage that it reaches on a line, so that its parent knows where it hung.
"""

import sys
import time

import torch
import torch.distributed as dist

_REPEATS = 5
_BYTES = {"nccl": 64 * 2**20, "gloo": 4 * 2**20}


def main(rank: int, ranks: int, backend: str, meeting_place: str) -> None:
    """Reduce over all processes, and print `done BYTES SECONDS`, the latter of one all-reduce."""
    print("connecting", flush=True)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{meeting_place}", rank=rank, world_size=ranks)
    print("reducing", flush=True)
    values = torch.ones(_BYTES[backend] // 4, device=device)
    dist.all_reduce(values)  # the first one also connects
    start = _now(device)
    for _ in range(_REPEATS):
        values.fill_(1)
        dist.all_reduce(values)
    seconds = (_now(device) - start) / _REPEATS
    if values.min().item() != ranks or values.max().item() != ranks:
        raise SystemExit(f"the sum over {ranks} ranks is wrong")
    print(f"done {values.nbytes} {seconds}", flush=True)
    dist.destroy_process_group()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
