"""Graceful shutdown on SIGINT (Ctrl-C), SIGTERM and SIGHUP.

Python runs signal handlers in the main thread, between two of its instructions. That may take long:
a native call does not return, or an environment catches the exception. So a separate thread reads
each signal at once (from the wakeup file of `signal`), sends it to the main thread again, and ends
the process if the main thread does not stop in time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

TYPE_CHECKING = False  # as in `typing`: fewer imports make signals work earlier
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PATIENCE = 2.0  # seconds that an iteration has to end by itself
_BETWEEN_REMINDERS = 0.5  # seconds
_LIMIT = 3.0  # seconds after a signal at which the process is ended, unless it saves
_LAST = 1.0  # seconds left after saving, or after a second signal
_TICK = 0.1  # seconds

_NAMES = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}


class SignalEnd(KeyboardInterrupt):
    """A signal interrupts the main thread.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """Exit status of a process that ended by this signal, by the convention of shells."""
        return 128 + self.number

    def __str__(self) -> str:
        return what_happened(self.number)


def what_happened(number: int) -> str:
    """Returns how messages describe the end by a signal.

    >>> what_happened(2), what_happened(15), what_happened(1)
    ('Interrupted', 'Terminated', 'Hung up')
    """
    return _NAMES.get(signal.Signals(number), "Hung up")


def say(text: str) -> None:
    """Prints to standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


class Signals:
    """Context in which signals raise `SignalEnd`, and end the process after some seconds.

    Signals that were ignored before (`nohup`, a background job) stay ignored. Forked children get
    the previous handlers back. Entering does nothing in other threads than the main one, or if a
    `Signals` is active.

    Attributes:
        requested: the number of the first signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._rescue: Callable[[str], None] | None = None
        self._is_announced = False
        self._announcing = threading.Lock()
        self._is_caught = False
        self._is_saving = False
        self._times_raised = 0
        self._reminders = 0
        self._found: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        # A copy when entered, since the descriptor is redirected during TensorFlow's start.
        self._stderr = 2
        self._wakeup = -1
        self._unraisable: Callable[[Any], Any] = sys.unraisablehook
        self._was_ignored = False  # the exception was raised in a destructor: Python ignores it

    # -- for the main thread --------------------------------------------------------------------

    def __enter__(self) -> Signals:
        global _entered
        if _entered is not None or threading.current_thread() is not threading.main_thread():
            return self
        _entered = self
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._found[number] = signal.signal(number, self._handle)
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)
        self._stderr = os.dup(2)
        self._wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._ignored
        watch = threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True)
        watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        global _entered
        if _entered is not self:
            return
        _entered = None
        self._restore()
        if self._pipe is not None:
            os.close(self._pipe[1])  # which ends the thread
            os.close(self._stderr)

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        sys.unraisablehook = self._unraisable
        for number, handler in self._found.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held_back(self, rescue: Callable[[str], None]) -> Iterator[Signals]:
        """Defers the first signal: it only sets `requested`, which the block must poll.

        A second signal, or one not acknowledged for seconds, raises `SignalEnd`. If the block does
        not end then either, the process is ended.

        Args:
            emergency_save: saves unsaved data and reports it, given a description of the event. It may be
                called in another thread while the main thread hangs.

        Raises:
            SignalEnd: at the end of the block, if `requested` was set and nothing was raised.
        """
        self._rescue = rescue
        try:
            try:
                yield self
            finally:
                if self.requested is not None:
                    self._announce(self.requested)  # the thread may not have done so yet
        finally:
            self._rescue = None
        if self.requested is not None:
            raise SignalEnd(self.requested)

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Lifts the time limit while saving, unless a second signal comes."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def caught(self) -> None:
        """Records that the main thread is shutting down: it gets no more reminders."""
        self._is_caught = True

    def leave_with(self, status: int) -> None:
        """Makes the next signal end the process at once with a status, since it is ending anyway.

        Leaving the context does not change that any more.
        """
        global _entered
        self.caught()
        _entered = None
        for number in self._found:
            signal.signal(number, lambda *_: os._exit(status))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        if first:
            self.requested = number
        if self._is_caught or (first and self._rescue is not None):
            return
        self._times_raised += 1
        raise SignalEnd(self.requested or number)

    def _ignored(self, what: sys.UnraisableHookArgs) -> None:
        """Handles exceptions that Python can only report; see `sys.unraisablehook`."""
        if isinstance(what.exc_value, SignalEnd):
            self._was_ignored = True
        elif self.requested is None:  # else a destructor of a half-made object after the signal
            self._unraisable(what)

    # -- the thread -----------------------------------------------------------------------------

    def _watch(self, reading: int) -> None:
        try:
            first = self._next_signal(reading, None)
            if first is not None:
                self._see_to_the_end(reading, first)
        finally:
            os.close(reading)

    def _see_to_the_end(self, reading: int, number: int) -> None:
        self._announce(number)
        began = time.monotonic()
        limit, remind_at = began + _LIMIT, began + _PATIENCE
        is_second = False
        while True:
            again = self._next_signal(reading, _TICK)
            if again == _CLOSED:
                return
            now = time.monotonic()
            if again is not None:
                limit, is_second = min(limit, now + (0.0 if is_second else _LAST)), True
            elif self._is_saving and not is_second:
                limit = max(limit, now + _LAST)
            if now >= limit:
                self._leave(number)
            is_due = now >= remind_at or self._was_ignored
            if is_due and not (self._is_caught or self._is_saving):
                remind_at, self._was_ignored = now + _BETWEEN_REMINDERS, False
                self._remind(number)

    def _next_signal(self, reading: int, seconds: float | None) -> int | None:
        """Waits for a signal that is not a reminder; returns its number, None, or `_CLOSED`."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([reading], [], [], left)[0]:
                return None
            number = (os.read(reading, 1) or b"\0")[0]
            if number == _CLOSED:
                return _CLOSED if seconds is not None else None
            if number in self._found and self._reminders:
                self._reminders -= 1
            elif number in self._found:
                return number

    def _remind(self, number: int) -> None:
        """Sends the signal to the main thread again, which also interrupts a blocking call."""
        self._reminders += 1
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _announce(self, number: int) -> None:
        """Prints, once, that training saves and ends after this iteration."""
        with self._announcing:
            if self._rescue is not None and not self._is_announced:
                self._is_announced = True
                self._say(
                    f"{what_happened(number)}: training saves and ends after this iteration. A "
                    "second signal ends it at once."
                )

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{text}\n".encode())

    def _leave(self, number: int) -> NoReturn:
        what = what_happened(number)
        if not self._is_caught:
            place = _place_of_main_thread()
            why = "swallowed the interruption" if self._times_raised else "did not end in time"
            what = f"{what}: {place} {why}, so the process was ended" if place else what
        rescue = None if self._is_saving else self._rescue
        with contextlib.suppress(BaseException):
            if rescue is not None:
                os.dup2(self._stderr, 2)
                rescue(what)
            elif not self._is_caught:
                self._say(f"{what}.")
        _end_children()
        if os.isatty(1):
            os.write(1, b"\033[?25h")  # a progress bar has hidden the cursor
        os._exit(128 + number)


_CLOSED = 0  # read when the other end of the pipe is closed; no signal has this number
_entered: Signals | None = None


def current() -> Signals:
    """Returns the active `Signals`, or a new, inactive one."""
    return _entered if _entered is not None else Signals()


class CtrlC:
    """Handles Ctrl-C in programs without `Signals`: the first one is deferred, the second is not.

    Attributes:
        requested: the number of the signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.requested: int | None = None

    @contextlib.contextmanager
    def held_back(self, rescue: Callable[[str], None]) -> Iterator[CtrlC]:
        """Defers the first Ctrl-C: it only sets `requested`, which the block must poll.

        The previous handler is restored afterwards. Nothing changes in other threads than the main
        one, or if the program has a custom handler.

        Args:
            emergency_save: not called; code that catches the `KeyboardInterrupt` must save.

        Raises:
            KeyboardInterrupt: at the end of the block if `requested` was set, or by a second
                Ctrl-C.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield self
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.requested is not None:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Does nothing: saving has no time limit here."""
        yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = number
        say("Interrupted: training ends after this iteration. A second Ctrl-C ends it at once.")


def interruptions() -> Signals | CtrlC:
    """Returns the active `Signals`; a `CtrlC` if the program uses none."""
    return _entered if _entered is not None else CtrlC()


def _in_child() -> None:
    global _entered
    if _entered is not None:
        _entered._restore()
        for descriptor in (*(_entered._pipe or ()), _entered._stderr):
            os.close(descriptor)
        _entered = None


os.register_at_fork(after_in_child=_in_child)


def _place_of_main_thread() -> str:
    """Returns the environment in which the main thread is, or else the function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None:
        owner = frame.f_locals.get("self")
        if _is_environment(owner):
            return f"{type(owner).__name__} ({_shown(frame)})"
        frame = frame.f_back
    return "" if innermost is None else f"`{innermost.f_code.co_name}` ({_shown(innermost)})"


def _is_environment(owner: object) -> bool:
    """Returns True if an object is a user's environment, by its methods and its module."""
    kind = type(owner)
    own = kind.__module__.partition(".")[0] in ("gymnasium", __name__.partition(".")[0])
    return (
        not own and callable(getattr(kind, "step", None)) and callable(getattr(kind, "reset", None))
    )


def _shown(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"


def _end_children() -> None:
    """Ends child processes of environments, which would otherwise keep this one waiting."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for child in multiprocessing.active_children():
            child.kill()
