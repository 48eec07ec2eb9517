"""Errors that osora raises on purpose, each with the exit code of the command."""


class OsoraError(Exception):
    """Base class of errors that a user can understand and fix.

    The message names the setting or file and its value, and the hint tells how to fix it, each in one line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class OsoraWarning(UserWarning):
    """A failure that changes no result. The command line shows it as one line."""


class RequestError(OsoraError):
    """A request is invalid or contradicts itself."""

    exit_code = 2


class FileProblem(OsoraError):
    """A file is missing, broken, or cannot be written."""

    exit_code = 3


class CheckpointError(FileProblem):
    """Weights are missing, truncated, or do not fit the model."""


class MediaError(FileProblem):
    """A picture or video cannot be read."""


class OutputError(FileProblem):
    """A result cannot be written."""


class InUseError(OutputError):
    """Another process is making the same result."""


class HardwareError(OsoraError):
    """This machine cannot run the request: a device or library is missing, or memory is too small."""

    exit_code = 4


def missing_library(need: str, *, extra: str) -> HardwareError:
    """Return the error for a library that is not installed, with the command that installs it.

    `need` names the feature and the library that it needs; `extra` is the optional dependency group of the library.
    """
    return HardwareError(
        f"{need}, which is not installed", hint=f"in osora's checkout: pip install -c constraints.txt '.[{extra}]'"
    )


class TrainingError(OsoraError):
    """Training diverged: losses or weights are not finite.

    The exit code is that of a bad request because the same settings fail on any machine. A lower learning rate, another
    precision or other data may help.
    """

    exit_code = RequestError.exit_code


class BatchError(OsoraError):
    """Some rows of a batch failed; the other rows are done."""

    exit_code = 5
