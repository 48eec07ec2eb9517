"""Hook of MkDocs: show the GIFs of `.readme/` on the pages, as `pictures/NAME.gif`."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PICTURES = Path(__file__).parents[1] / ".readme"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the GIFs of the README to the files that MkDocs found."""
    for picture in sorted(PICTURES.glob("*.gif")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files
