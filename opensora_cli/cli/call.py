"""One call of a command: its command line, its results, and the import of the engine."""

import gc
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from opensora_cli.cli import output
from opensora_cli.core.exceptions import RequestError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import RankContext
from opensora_cli.core.signals import held_back
from opensora_cli.settings.hardware import PlannedMachine, read_machine

if TYPE_CHECKING:
    from opensora_cli.core.documents import Document

T = TypeVar("T")

VERBOSE = "--verbose"


@dataclass(frozen=True)
class Call:
    """One call of a command: its command line and its results."""

    words: tuple[str, ...]
    """Command line without the name of the program."""
    given: Mapping[str, object]
    """Values of the given options and arguments by their typed form, `--steps` or `PROMPT`."""
    on_ranks: bool = False
    """Whether the ranks of a job run the command together."""
    is_brief: bool = False
    """Whether details are shown with --verbose alone."""

    def value(self, label: str, kind: type[T]) -> T | None:
        """Return the value of an option without a setting; None if it was not given."""
        value = self.given.get(label)
        assert value is None or isinstance(value, kind), label
        return value

    @property
    def assignments(self) -> list[str]:
        """Values of `--set`."""
        return self.value("--set", list) or []

    @property
    def config(self) -> Path | None:
        """Value of `--config`."""
        return self.value("--config", Path)

    @property
    def as_json(self) -> bool:
        """Whether results are printed as JSON."""
        return "--json" in self.given

    @property
    def is_quiet(self) -> bool:
        """Whether only results and errors are printed."""
        return "--quiet" in self.given

    @property
    def planned(self) -> PlannedMachine | None:
        """Machine of `--on`. Raises RequestError if there is no such machine."""
        name = self.value("--on", str)
        return None if name is None else read_machine(name)

    @cached_property
    def reporter(self) -> Reporter:
        """Reporter of progress and messages. Of ranks that run the command together, only the first one reports."""
        context = output.rank_context() if self.on_ranks else None
        is_quiet = self.is_quiet or not (context is None or context.is_main)
        return output.make_reporter(quiet=is_quiet, is_brief=self.is_brief and VERBOSE not in self.given)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Import torch and the engine inside the block; report on a terminal that this takes seconds."""
        if "torch" not in sys.modules and sys.stderr is not None and sys.stderr.isatty():
            self.reporter.note("loading torch ...")
        with importing():
            yield

    def show(self, result: "Document | None", *, context: RankContext | None = None) -> None:
        """Print a result, and raise the error for its problems. None stands for a result that a rank has printed.

        The first of the ranks of `context` prints. All raise, so that they end with the same exit code.
        Commands without ranks of their own, such as `srun osora env-check`, print in every process.
        """
        if result is None:
            return
        if context is None or context.is_main:
            output.print_result(result, as_json=self.as_json, is_quiet=self.is_quiet)
        result.raise_for_problems()

    def again(self, *labels: str) -> list[str]:
        """Return the given options of `labels` and those of printing, as words of a rank's command line."""
        words: list[str] = []
        for label in (*labels, "--json", "--quiet", VERBOSE):
            match self.given.get(label):
                case None:
                    continue
                case True:
                    words.append(label)
                case list(values):
                    words += [f"{label}={value}" for value in values]
                case value:
                    words.append(f"{label}={value}")
        return words

    def refuse(self, labels: Container[str], *, beside: str, hint: str = "drop one of them") -> None:
        """Raise RequestError if one of the options `labels`, which have no effect with `beside`, was given."""
        if clash := next((label for label in self.given if label in labels), None):
            raise RequestError(f"{clash} has no effect with {beside}", hint=hint)

    def require(self, label: str, *, beside: str) -> None:
        """Raise RequestError if the option `beside` was given without `label`, which `beside` needs."""
        if beside in self.given and label not in self.given:
            raise RequestError(f"{beside} has no effect without {label}: give both, or none")


@contextmanager
def importing() -> Iterator[None]:
    """Hold back Ctrl-C while torch and the modules that need it are imported: interrupted, an import can abort.

    The objects of torch stay, so garbage collection is off meanwhile and ignores them afterwards: scanning them takes a
    tenth of a second each time. From then on, log messages of libraries are escaped.
    """
    is_first = "torch" not in sys.modules
    output.escape_foreign_logs()
    if is_first:
        gc.disable()
    try:
        with held_back():
            yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()
