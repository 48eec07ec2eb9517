"""`osora generate --explore K`: seeds that are started, and a sheet of their previews."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from opensora_cli.core.documents import Document
from opensora_cli.core.exceptions import MediaError, OutputError
from opensora_cli.core.media_choices import MediaFormat
from opensora_cli.core.progress import Reporter
from opensora_cli.engine.generate.outputs import SampleFiles, preview_path, sheet_path


class ExploredSeed(Document):
    """Sample that `--explore` started."""

    seed: int
    state: Path
    """Latents to continue from."""
    steps: int | None
    """Steps done; None means all steps."""
    preview: Path | None
    """Animation of the last prediction; None without previews."""
    command: str = Field(exclude=True)
    """Command that finishes the sample."""

    def line(self) -> str:
        """Return the command that finishes the sample, with its seed."""
        return f"{self.command}  # seed {self.seed}"


def is_explored(sample: SampleFiles) -> bool:
    """Return whether the saved latents of a sample have at least the steps that are explored."""
    stop = sample.settings.sampling.stop_at
    assert stop is not None
    return sample.saved is not None and (sample.saved_steps is None or sample.saved_steps >= stop)


def explored_seed(sample: SampleFiles) -> ExploredSeed:
    """Return the document of an explored seed."""
    assert sample.latents is not None
    steps = sample.saved_steps if is_explored(sample) else sample.settings.sampling.stop_at
    preview = preview_path(sample.target)
    return ExploredSeed(
        seed=sample.seed,
        state=sample.latents,
        steps=steps,
        preview=preview if preview.is_file() else None,
        command=sample.command(sample.latents, is_begun=steps is not None),
    )


def write_sheet(files: Sequence[SampleFiles], reporter: Reporter) -> Path | None:
    """Write the sheet with the last preview of each explored seed; return None, with a warning, if that fails."""
    from opensora_cli.media.read import read_video
    from opensora_cli.media.sheets import contact_sheet, film_strip
    from opensora_cli.media.write import write_media

    cells = []
    for sample in files:
        try:
            strip_HWC = film_strip(read_video(preview_path(sample.target)).frames_THWC)
        except MediaError:
            strip_HWC = None
        cells.append((f"seed {sample.seed}" + (" (finished)" if sample.made_before else ""), strip_HWC))
    try:
        path = sheet_path(files[0].target)
        return write_media([contact_sheet(cells)[None]], path, fps=1, format=MediaFormat.PNG)
    except OutputError as error:
        reporter.warn(f"there is no sheet of the seeds: {error.message}")
        return None
