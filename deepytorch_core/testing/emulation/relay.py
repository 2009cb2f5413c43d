"""The delay of an emulated link: a process that passes frames between pairs of interfaces.

The kernels of many machines lack netem. Here each node's cable is a pair of TAP interfaces whose
other ends this program holds. It is run by path, so it uses the standard library alone:

    python relay.py DELAY_US NODE_FD SWITCH_FD [NODE_FD SWITCH_FD ...]

Frames from a node wait for DELAY_US, frames to it pass at once. It ends when its standard input
does, that is with the process that started it, and the interfaces go with it. Frames carry the
header of virtio_net, so a large segment crosses as one frame, as it does between virtual machines.
"""

import contextlib
import os
import select
import sys
import time
from collections import deque

_MAX_FRAME_BYTES = 1 << 17
_FRAMES_PER_TURN = 32


def relay(delay_s: float, cables: list[tuple[int, int]], stop: int) -> None:
    """Passes frames until `stop` is readable."""
    upwards = dict(cables)
    downwards = {switch: node for node, switch in cables}
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait equally long: first in, first out
    sources = [stop, *upwards, *downwards]
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(sources, [], [], timeout)
        if stop in ready:
            return
        for source in ready:
            for _ in range(_FRAMES_PER_TURN):
                try:
                    frame = os.read(source, _MAX_FRAME_BYTES)
                except OSError:  # no more, or the interface is down
                    break
                if source in upwards:
                    waiting.append((time.monotonic() + delay_s, upwards[source], frame))
                else:
                    _pass_on(downwards[source], frame)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, frame = waiting.popleft()
            _pass_on(target, frame)


def _pass_on(target: int, frame: bytes) -> None:
    # An interface that is down takes nothing: the frame is lost, as on a cable.
    with contextlib.suppress(OSError):
        os.write(target, frame)


def main(arguments: list[str]) -> None:
    delay_us, *descriptors = (int(text) for text in arguments)
    for descriptor in descriptors:
        os.set_blocking(descriptor, False)
    pairs = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    relay(delay_us * 1e-6, pairs, sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
