# SPDX-License-Identifier: Apache-2.0
"""How a run ends before its last step: by Ctrl-C or SIGTERM."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch.distributed as dist

INTERRUPTED = 130  # the exit status that shells give to what Ctrl-C has ended
_ONE_PRESS_S = 1.0  # a launcher may pass on a Ctrl-C that the terminal has sent to all


class Endings:
    """Handles SIGINT, which is Ctrl-C, and SIGTERM in a recipe.

    While it trains both are noted, and a step is finished before anything happens. Else there is
    nothing to save, and Ctrl-C is a KeyboardInterrupt. After a Ctrl-C the next of either ends the
    process at once: torchrun makes a SIGTERM of a second Ctrl-C.
    """

    def __init__(self, recipe: str) -> None:
        self.asked = False
        self.promise = "ends after this step, with a checkpoint"
        self._recipe = recipe
        self._noting = self._is_interrupted = False
        self._pid = os.getpid()

    @property
    def status(self) -> int:
        """The exit status of a run that has ended as it was told."""
        return INTERRUPTED if self._is_interrupted else 0

    @contextmanager
    def of_ctrl_c(self) -> Iterator[None]:
        """Handle SIGINT in here, unless it is ignored, as in a job of a shell's background."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        if not is_main_thread or before in (signal.SIG_IGN, None):
            yield
            return
        # Python's handlers wait for the backward pass or a collective to return: a thread does not.
        arrivals, pipe = os.pipe()
        os.set_blocking(pipe, False)
        _pipes.add(pipe)
        watch = threading.Thread(target=self._watch, args=(arrivals,), daemon=True)
        watch.start()
        pipe_before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, self._come)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            signal.set_wakeup_fd(pipe_before)
            os.write(pipe, bytes([0]))  # no signal's number
            watch.join()
            _pipes.discard(pipe)
            os.close(pipe)
            os.close(arrivals)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """From here on SIGINT is noted, and SIGTERM in here."""
        self._noting = True
        before = signal.signal(signal.SIGTERM, self._come)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def say_interrupted(self) -> int:
        """Say what became of a KeyboardInterrupt, and give the exit status."""
        self._say("ended by Ctrl-C; there was nothing to save")
        return INTERRUPTED

    def _come(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a worker that loads data: its rank needs it to finish the step
        is_first = not self._is_interrupted
        self.asked = True
        self._is_interrupted |= number == signal.SIGINT
        if is_first and self._is_interrupted and not self._noting:
            raise KeyboardInterrupt

    def _watch(self, arrivals: int) -> None:
        interrupted_at: float | None = None
        while number := os.read(arrivals, 1)[0]:
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            now = time.monotonic()
            if interrupted_at is None:
                if number == signal.SIGINT:
                    interrupted_at = now
                    if self._noting:
                        self._say(f"Ctrl-C: {self.promise}; a second Ctrl-C ends at once")
            elif now - interrupted_at > _ONE_PRESS_S:
                self._say("ended at once by a second Ctrl-C: what was not saved yet is lost")
                os._exit(INTERRUPTED)

    def _say(self, text: str) -> None:
        """Once a node, as all its ranks get the signal; what it came amidst may be a print."""
        if dist.get_node_local_rank(fallback_rank=0) == 0:
            with suppress(OSError):
                os.write(2, f"{self._recipe}: {text}\n".encode())


_pipes: set[int] = set()  # those by which a thread of this process learns of signals


def _leave_pipes() -> None:
    # Else the signals of a worker that loads data would count as its rank's.
    if _pipes:
        signal.set_wakeup_fd(-1)
        _pipes.clear()


os.register_at_fork(after_in_child=_leave_pipes)
