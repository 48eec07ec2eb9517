"""Figures of a server for Prometheus."""

from collections.abc import Mapping

import psutil  # type: ignore[import-untyped]
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

from opensora_cli.server.jobs import Status

MEDIA_TYPE = CONTENT_TYPE_LATEST


def exposition(counts: Mapping[Status, int], seconds: Mapping[str, float]) -> bytes:
    """Return jobs by state, seconds of work by stage, the length of the queue, and memory of the server's processes."""
    registry = CollectorRegistry()
    jobs = Gauge("osora_jobs", "Jobs by state.", ["status"], registry=registry)
    for status, count in counts.items():
        jobs.labels(status).set(count)
    Gauge("osora_queue_length", "Jobs that wait.", registry=registry).set(counts[Status.QUEUED])
    worked = Gauge("osora_stage_seconds_total", "Seconds of work by stage.", ["stage"], registry=registry)
    for stage, each in seconds.items():
        worked.labels(stage).set(each)
    memory = Gauge("osora_resident_bytes", "Memory of processes.", ["process"], registry=registry)
    own = psutil.Process()
    memory.labels("server").set(own.memory_info().rss)
    memory.labels("workers").set(sum(each.memory_info().rss for each in own.children()))
    return generate_latest(registry)
