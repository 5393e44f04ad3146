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

_REMINDER_DELAY = 2.0  # seconds that an iteration has to end by itself
_REMINDER_INTERVAL = 0.5  # seconds
_EXIT_DEADLINE = 3.0  # seconds after a signal at which the process is ended, unless it saves
_FINAL_GRACE = 1.0  # seconds left after saving, or after a second signal
_POLL_SECONDS = 0.1  # seconds

_DESCRIPTIONS = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}


class SignalInterrupt(KeyboardInterrupt):
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
        return describe_signal(self.number)


def describe_signal(number: int) -> str:
    """Returns how messages describe the end by a signal.

    >>> describe_signal(2), describe_signal(15), describe_signal(1)
    ('Interrupted', 'Terminated', 'Hung up')
    """
    return _DESCRIPTIONS.get(signal.Signals(number), "Hung up")


def print_to_stderr(text: str) -> None:
    """Prints to standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


class ShutdownHandler:
    """Context in which signals raise `SignalInterrupt`, and end the process after some seconds.

    Signals that were ignored before (`nohup`, a background job) stay ignored. Forked children get
    the previous handlers back. Entering does nothing in other threads than the main one, or if a
    `ShutdownHandler` is active.

    Attributes:
        requested: the number of the first signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._emergency_save: Callable[[str], None] | None = None
        self._is_announced = False
        self._announce_lock = threading.Lock()
        self._is_acknowledged = False
        self._is_saving = False
        self._times_raised = 0
        self._reminders = 0
        self._previous_handlers: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        # A copy when entered, since the descriptor is redirected during TensorFlow's start.
        self._stderr = 2
        self._wakeup = -1
        self._previous_unraisable_hook: Callable[[Any], Any] = sys.unraisablehook
        self._was_swallowed = False  # the exception was raised in a destructor: Python ignores it

    # -- for the main thread --------------------------------------------------------------------

    def __enter__(self) -> ShutdownHandler:
        global _active_handler
        if _active_handler is not None or threading.current_thread() is not threading.main_thread():
            return self
        _active_handler = self
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)
        self._stderr = os.dup(2)
        self._wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._previous_unraisable_hook, sys.unraisablehook = (
            sys.unraisablehook,
            self._handle_unraisable,
        )
        watch = threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True)
        watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        global _active_handler
        if _active_handler is not self:
            return
        _active_handler = None
        self._restore()
        if self._pipe is not None:
            os.close(self._pipe[1])  # which ends the thread
            os.close(self._stderr)

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        sys.unraisablehook = self._previous_unraisable_hook
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def defer(self, emergency_save: Callable[[str], None]) -> Iterator[ShutdownHandler]:
        """Defers the first signal: it only sets `requested`, which the block must poll.

        A second signal, or one not acknowledged for seconds, raises `SignalInterrupt`. If the block
        does not end then either, the process is ended.

        Args:
            emergency_save: saves unsaved data and reports it, given a description of the event. It
                may be called in another thread while the main thread hangs.
        """
        self._emergency_save = emergency_save
        try:
            try:
                yield self
            finally:
                if self.requested is not None:
                    self._announce(self.requested)  # the thread may not have done so yet
        finally:
            self._emergency_save = None
        if self.requested is not None:
            raise SignalInterrupt(self.requested)

    @contextlib.contextmanager
    def allow_unlimited_time(self) -> Iterator[None]:
        """Lifts the time limit while saving, unless a second signal comes."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def acknowledge(self) -> None:
        """Records that the main thread is shutting down: it gets no more reminders."""
        self._is_acknowledged = True

    def exit_at_next_signal(self, status: int) -> None:
        """Makes the next signal end the process at once with a status, since it is ending anyway.

        Leaving the context does not change that any more.
        """
        global _active_handler
        self.acknowledge()
        _active_handler = None
        for number in self._previous_handlers:
            signal.signal(number, lambda *_: os._exit(status))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        if first:
            self.requested = number
        if self._is_acknowledged or (first and self._emergency_save is not None):
            return
        self._times_raised += 1
        raise SignalInterrupt(self.requested or number)

    def _handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Handles exceptions that Python can only report; see `sys.unraisablehook`."""
        if isinstance(unraisable.exc_value, SignalInterrupt):
            self._was_swallowed = True
        elif self.requested is None:  # else a destructor of a half-made object after the signal
            self._previous_unraisable_hook(unraisable)

    # -- the thread -----------------------------------------------------------------------------

    def _watch(self, reading: int) -> None:
        try:
            first = self._wait_for_signal(reading, None)
            if first is not None:
                self._enforce_shutdown(reading, first)
        finally:
            os.close(reading)

    def _enforce_shutdown(self, reading: int, number: int) -> None:
        self._announce(number)
        start = time.monotonic()
        limit, remind_at = start + _EXIT_DEADLINE, start + _REMINDER_DELAY
        is_second = False
        while True:
            next_number = self._wait_for_signal(reading, _POLL_SECONDS)
            if next_number == _CLOSED:
                return
            now = time.monotonic()
            if next_number is not None:
                limit, is_second = min(limit, now + (0.0 if is_second else _FINAL_GRACE)), True
            elif self._is_saving and not is_second:
                limit = max(limit, now + _FINAL_GRACE)
            if now >= limit:
                self._end_process(number)
            is_due = now >= remind_at or self._was_swallowed
            if is_due and not (self._is_acknowledged or self._is_saving):
                remind_at, self._was_swallowed = now + _REMINDER_INTERVAL, False
                self._remind(number)

    def _wait_for_signal(self, reading: int, seconds: float | None) -> int | None:
        """Waits for a signal that is not a reminder; returns its number, None, or `_CLOSED`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([reading], [], [], remaining)[0]:
                return None
            number = (os.read(reading, 1) or b"\0")[0]
            if number == _CLOSED:
                return _CLOSED if seconds is not None else None
            if number in self._previous_handlers and self._reminders:
                self._reminders -= 1
            elif number in self._previous_handlers:
                return number

    def _remind(self, number: int) -> None:
        """Sends the signal to the main thread again, which also interrupts a blocking call."""
        self._reminders += 1
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _announce(self, number: int) -> None:
        """Prints, once, that training saves and ends after this iteration."""
        with self._announce_lock:
            if self._emergency_save is not None and not self._is_announced:
                self._is_announced = True
                self._print(
                    f"{describe_signal(number)}: training saves and ends after this iteration. A "
                    "second signal ends it at once."
                )

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{text}\n".encode())

    def _end_process(self, number: int) -> NoReturn:
        message = describe_signal(number)
        if not self._is_acknowledged:
            location = _locate_main_thread()
            reason = "swallowed the interruption" if self._times_raised else "did not end in time"
            message = (
                f"{message}: {location} {reason}, so the process was ended" if location else message
            )
        emergency_save = None if self._is_saving else self._emergency_save
        with contextlib.suppress(BaseException):
            if emergency_save is not None:
                os.dup2(self._stderr, 2)
                emergency_save(message)
            elif not self._is_acknowledged:
                self._print(f"{message}.")
        _end_children()
        if os.isatty(1):
            os.write(1, b"\033[?25h")  # a progress bar has hidden the cursor
        os._exit(128 + number)


_CLOSED = 0  # read when the other end of the pipe is closed; no signal has this number
_active_handler: ShutdownHandler | None = None


def get_active_handler() -> ShutdownHandler:
    """Returns the active `ShutdownHandler`, or a new, inactive one."""
    return _active_handler if _active_handler is not None else ShutdownHandler()


class KeyboardInterruptHandler:
    """Handles Ctrl-C in programs without `ShutdownHandler`: defers the first, not the second.

    Attributes:
        requested: the number of the signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.requested: int | None = None

    @contextlib.contextmanager
    def defer(self, emergency_save: Callable[[str], None]) -> Iterator[KeyboardInterruptHandler]:
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
    def allow_unlimited_time(self) -> Iterator[None]:
        """Does nothing: saving has no time limit here."""
        yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = number
        print_to_stderr(
            "Interrupted: training ends after this iteration. A second Ctrl-C ends it at once."
        )


def get_interrupt_handler() -> ShutdownHandler | KeyboardInterruptHandler:
    """Returns the active `ShutdownHandler`, or else a `KeyboardInterruptHandler`."""
    return _active_handler if _active_handler is not None else KeyboardInterruptHandler()


def _reset_in_child() -> None:
    global _active_handler
    if _active_handler is not None:
        _active_handler._restore()
        for descriptor in (*(_active_handler._pipe or ()), _active_handler._stderr):
            os.close(descriptor)
        _active_handler = None


os.register_at_fork(after_in_child=_reset_in_child)


def _locate_main_thread() -> str:
    """Returns the environment in which the main thread is, or else the function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None:
        owner = frame.f_locals.get("self")
        if _is_user_environment(owner):
            return f"{type(owner).__name__} ({_format_frame(frame)})"
        frame = frame.f_back
    return "" if innermost is None else f"`{innermost.f_code.co_name}` ({_format_frame(innermost)})"


def _is_user_environment(owner: object) -> bool:
    """Returns True if an object is a user's environment, by its methods and its module."""
    owner_class = type(owner)
    is_library = owner_class.__module__.partition(".")[0] in (
        "gymnasium",
        __name__.partition(".")[0],
    )
    return (
        not is_library
        and callable(getattr(owner_class, "step", None))
        and callable(getattr(owner_class, "reset", None))
    )


def _format_frame(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"


def _end_children() -> None:
    """Ends child processes of environments, which would otherwise keep this one waiting."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None:
        for child in multiprocessing.active_children():
            child.kill()
