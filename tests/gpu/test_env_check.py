"""`osora env-check` on a machine with a GPU."""

import os

import torch

from opensora_cli.core import device_facts
from opensora_cli.engine.env_check.check import check_all_reduce, env_check
from opensora_cli.engine.env_check.report import Severity
from opensora_cli.settings.tools import EnvCheckSettings


def test_facts_of_the_gpus():
    found = device_facts.read_gpus()
    assert len(found) == torch.cuda.device_count()
    assert all(0 < gpu.free_bytes <= gpu.total_bytes and gpu.failure is None for gpu in found)
    assert len(device_facts.read_links(found)) == len(found) * (len(found) - 1) // 2
    facts = device_facts.read_torch()
    assert facts.cuda_available
    assert facts.cudnn


def test_nccl_over_all_gpus():
    (finding,) = check_all_reduce(num_gpus=torch.cuda.device_count(), seconds=120, environment=os.environ)
    assert finding.severity is Severity.OK
    assert finding.message.startswith("nccl over ")
    assert ": 64 MiB in " in finding.message


def test_nothing_stops_a_run_here():
    report = env_check(EnvCheckSettings(all_reduce=False), environment={})
    assert [finding.message for finding in report.findings if finding.severity is Severity.PROBLEM] == []
    assert [finding.message for finding in report.findings if finding.severity is Severity.UNKNOWN] == []
