"""A background thread for saving."""

from collections.abc import Callable
from threading import Thread


class BackgroundJob:
    """One job at a time in a thread; Python waits for it before it exits."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self.error: BaseException | None = None
        """Error of the last job, until `take_error` returns it."""

    def start(self, do: Callable[[], None]) -> None:
        """Start a job after the last one was joined. If no thread can be started, the job runs in this thread."""

        def run() -> None:
            try:
                do()
            except BaseException as error:
                self.error = error

        thread = Thread(target=run, name="osora-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # for example with `ulimit -u`
            run()
        else:
            self._thread = thread

    def join(self) -> None:
        """Wait for the end of the job; after an interrupted wait, call this again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> BaseException | None:
        """Return the error of the last job once."""
        error, self.error = self.error, None
        return error
