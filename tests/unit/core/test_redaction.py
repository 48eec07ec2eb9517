"""What a bug report must not give away."""

import pytest

from opensora_cli.core.redaction import Redactor, shown_variables

REDACTOR = Redactor({"ada": "<user>", "analytical": "<host>", "analytical.example.org": "<host>"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("70 GiB free for /home/ada/ckpts", "70 GiB free for <path>"),
        ("analytical:29500", "<host>:29500"),
        ("HF_TOKEN=hf_abcdefghijklmnop", "HF_TOKEN=<hidden>"),
        ("OSORA_REFINE_KEY=1 OSORA_REFINE_MODEL=small", "OSORA_REFINE_KEY=<hidden> OSORA_REFINE_MODEL=small"),
        ("MASTER_ADDR=10.0.0.7", "MASTER_ADDR=<hidden>"),
        ("CUDA_VISIBLE_DEVICES=GPU-8f3ad1c2-0a1b-2c3d-4e5f-0123456789ab", "CUDA_VISIBLE_DEVICES=<hidden>"),
        ("http://ada:secret@proxy:80/x", "http://<hidden>@proxy:80/x"),
        ("/data/secret-project/weights missing", "<path> missing"),
        ("LD_LIBRARY_PATH=/usr/local/cuda/lib64:/opt/acme/lib", "LD_LIBRARY_PATH=/usr/local/cuda/lib64:<path>"),
        ("at /mnt/the engine/x/y.pt:3 and ada", "at <path>:3 and <user>"),
        ("'/data/two words/x'", "'<path>'"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("/dev/shm has 64 MiB", "/dev/shm has 64 MiB"),
        ("sk-abcdefgh12345678 ghp_0123456789abcdef", "<hidden> <hidden>"),
        ("PYTORCH_ALLOC_CONF=expandable_segments:True", "PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ],
)
def test_text(text, shown):
    assert REDACTOR.text(text) == shown


def test_documents():
    document = {
        "environment": {"HF_TOKEN": "opensesame", "MASTER_ADDR": "node7", "NCCL_DEBUG": "INFO"},
        "findings": [{"message": "/home/ada/x", "line": 3, "why": None}],
    }
    assert REDACTOR.document(document) == {
        "environment": {"HF_TOKEN": "<hidden>", "MASTER_ADDR": "<hidden>", "NCCL_DEBUG": "INFO"},
        "findings": [{"message": "<path>", "line": 3, "why": None}],
    }


def test_only_variables_that_matter_are_shown():
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "opensesame", "SHELL": "/bin/bash"}
    assert shown_variables(environment) == {"HF_TOKEN": "<hidden>", "NCCL_DEBUG": "INFO"}


def test_user_and_host_of_this_machine_are_hidden(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    monkeypatch.setattr("socket.gethostname", lambda: "analytical.example.org")
    assert Redactor.of_this_machine().text("ada on analytical") == "<user> on <host>"
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    assert Redactor.of_this_machine().text("the root of it") == "the root of it"
