"""What a comparison is refused for before torch is imported."""

from collections.abc import Mapping
from dataclasses import replace

from opensora_cli.core.progress import Reporter
from opensora_cli.engine.generate import early
from opensora_cli.settings.bench_generate import Changes, layer_of, refuse_unfit
from opensora_cli.settings.load import GenerateRequest


def refuse_early(request: GenerateRequest, tries: Mapping[str, Changes], *, reporter: Reporter) -> None:
    """Refuse what is wrong with the exact run, or with what a `--try` changes; the run checks all of it again.

    Raises:
        RequestError: a value breaks a rule, or something other than one whole video is asked for.
        FileProblem: settings, a reference, an adapter or weights are missing.
    """
    early.refuse_early(request, dry_run=False, reporter=reporter)
    settings = early.settings_early(request, [])
    if settings is not None:
        refuse_unfit(settings)
    for name, changes in tries.items():
        tried = replace(request, overrides={**request.overrides, **layer_of(name, changes)})
        early.refuse_early(tried, dry_run=True, reporter=reporter)
