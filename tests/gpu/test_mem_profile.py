"""`osora mem-profile` on a CUDA device: the demo's figures are the allocator's."""

import json
import pickle

from opensora_cli.cli.app import main

COMMAND = ["mem-profile", "--device", "cuda", "--json"]


def document(capsys, *args):
    assert main([*COMMAND, *args]) == 0
    return json.loads(capsys.readouterr().out)


def test_stages_and_the_history_of_the_allocator(capsys, tmp_path):
    found = document(capsys, "--snapshot", str(tmp_path / "history.pickle"))
    assert all(stage["measured_bytes"] > 0 for stage in found["stages"])
    history = pickle.loads((tmp_path / "history.pickle").read_bytes())
    assert any(event["action"] == "alloc" for trace in history["device_traces"] for event in trace)


def test_attention_backends_are_compared(capsys):
    costs = document(capsys, "--compare")["attention"]
    kinds = {cost["kind"] for cost in costs if cost["reason"] is None}
    assert kinds - {"cudnn"} == {"standard (math)", "memory-efficient", "flash"}
