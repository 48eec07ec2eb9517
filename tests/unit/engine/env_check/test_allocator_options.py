"""The rules for allocator options, compared with torch's own parser where this torch has it."""

import pytest
import torch

from opensora_cli.engine.env_check.allocator_options import find_faults

ACCEPTED = [
    "",
    "expandable_segments:True",
    " expandable_segments : True , max_split_size_mb:128",
    "expandable_segments:True,",
    "max_split_size_mb:20",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,256:4,>:0]",
    "max_non_split_rounding_mb:20",
    "large_segment_size_mb:11",
    "large_segment_size_mb:11,max_split_size_mb:11",
    "pinned_use_background_threads:True",
    "pinned_max_cached_size_mb:64",
]
# The rules are those of torch 2.13; 2.10 has no such options yet.
NEWER = ("large_segment_size_mb", "pinned_max_cached_size_mb")
REFUSED = [
    "expandable_segments:true",
    "expandable_segments",
    "expandable_segments=True",
    "expandable_segments:True,,",
    "expandable_segments:True max_split_size_mb:128",
    "max_split_size_mb:128;expandable_segments:True",
    "max_split_size_mb:19",
    "max_split_size_mb:many",
    "large_segment_size_mb:10",
    "large_segment_size_mb:512,max_split_size_mb:128",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[63:8]",
    "backend=native",
]


@pytest.fixture
def parse(request):
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None or torch.cuda.is_available():
        pytest.skip("needs torch's parser, and no GPU whose settings it would change")
    has_newer = torch.__version__ >= "2.13"
    if not has_newer and any(name in request.node.name for name in NEWER):
        pytest.skip("an option that this torch has not yet")
    yield parse
    if has_newer:
        parse("large_segment_size_mb:20")  # the default, which it would keep


@pytest.mark.parametrize("text", ACCEPTED)
def test_torch_and_the_rules_accept(text, parse):
    parse(text)
    assert list(find_faults(text)) == []


@pytest.mark.parametrize("text", REFUSED)
def test_torch_and_the_rules_refuse(text, parse):
    with pytest.raises((RuntimeError, ValueError)):
        parse(text)
    assert any(fault.is_fatal for fault in find_faults(text))


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("backend=cudaMallocAsync", "write backend:cudaMallocAsync"),
        ("expandable_segments=True;max_split_size_mb=128", "write expandable_segments:True,max_split_size_mb:128"),
        ("expandable_segments:True max_split_size_mb:128", "write expandable_segments:True,max_split_size_mb:128"),
        ("nonsense", "write it as in expandable_segments:True"),
        ("expandable_segment:True", "did you mean expandable_segments?"),
    ],
)
def test_a_suggested_text_passes_the_rules(text, fix):
    (fault,) = find_faults(text)
    assert fault.fix == fix
    if fix.startswith("write ") and "as in" not in fix:
        assert list(find_faults(fix.removeprefix("write "))) == []


def test_options_that_exclude_each_other():
    (fault,) = find_faults("backend:cudaMallocAsync,expandable_segments:True,max_split_size_mb:128")
    assert fault.message == "backend:cudaMallocAsync excludes expandable_segments, max_split_size_mb"
    assert not fault.is_fatal
    assert list(find_faults("backend:cudaMallocAsync,pinned_use_background_threads:True")) == []


@pytest.mark.parametrize("text", ["backend:async", "pinned_num_register_threads:3", "per_process_memory_fraction:1.5"])
def test_options_of_cuda_alone(text):
    (fault,) = find_faults(text)
    assert fault.is_fatal
