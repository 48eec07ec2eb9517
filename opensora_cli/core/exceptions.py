"""The one family of errors that osora raises on purpose, each with the exit code it ends a command with."""


class OsoraError(Exception):
    """A failure that a user can understand and act on.

    The message names the setting or file and its value, and the hint how to fix it, each in one line.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class OsoraWarning(UserWarning):
    """A failure that changes no result. The command line shows it as one line."""


class RequestError(OsoraError):
    """What was asked for makes no sense or contradicts itself."""

    exit_code = 2


class FileProblem(OsoraError):
    """A file is missing, broken, or cannot be written."""

    exit_code = 3


class CheckpointError(FileProblem):
    """Weights are missing, truncated, or do not fit the model."""


class MediaError(FileProblem):
    """A picture or video cannot be read."""


class TooShortError(MediaError):
    """A video has fewer frames than are needed."""

    def __init__(self, message: str, *, num_frames: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.num_frames = num_frames
        """That it has."""


class OutputError(FileProblem):
    """A result cannot be written."""


class InUseError(OutputError):
    """Another process makes the same result."""


class HardwareError(OsoraError):
    """This machine cannot do it: no such device, too little memory, a missing library."""

    exit_code = 4


def missing_library(need: str, *, extra: str) -> HardwareError:
    """Return the error of a library that is not installed, with the line that installs it.

    `need` says what needs which library, and `extra` is the name of the optional libraries that it is one of.
    """
    return HardwareError(
        f"{need}, which is not installed", hint=f"in osora's checkout: pip install -c constraints.txt '.[{extra}]'"
    )


class TrainingError(OsoraError):
    """Training diverged: losses or weights are not finite.

    It has the exit code of a bad request, since the same settings fail on any machine; a lower learning rate, another
    precision or other data may not.
    """

    exit_code = RequestError.exit_code


class BatchError(OsoraError):
    """Some rows of a batch failed; the others are done."""

    exit_code = 5
