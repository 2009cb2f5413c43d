"""Chooses NCCL's settings by a measured link and the network adapters: pure functions.

NCCL opens one TCP connection for each of its channels and peers, and starts with few channels
where it takes the link for slow. Under a cap per connection, as clouds have it, the link then stays
mostly idle. There are two ways to more connections:

* more channels (`NCCL_MIN_NCHANNELS`): small messages are still sent on as few channels as before,
  so they cost nothing; each channel takes a block of a GPU's threads while a large message runs;
* several connections per channel, served by helper threads (`NCCL_SOCKET_NTHREADS`,
  `NCCL_NSOCKS_PERTHREAD`). Every message, small ones too, is handed to a helper and back. That made
  64 KB four times slower where it was measured.

So channels come first, and helpers only for what channels within reason can't reach. Without a
measured cap nothing is set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deepytorch_core.network.link import Link

_MAX_CHANNELS = 16
_MAX_HELPER_SOCKETS = 16  # of one channel
_MIN_HELPER_CORES = 2.0  # free per rank: a helper that waits for a core is worse than none
_DEFAULT_BUFFER_BYTES = 4 << 20  # NCCL's, of each channel
_MAX_BUFFER_BYTES = 16 << 20

CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS")
HELPERS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")


@dataclass(frozen=True)
class Choice:
    """NCCL's variables with their values, and why, in a few words each."""

    settings: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __add__(self, other: Choice) -> Choice:
        return Choice({**self.settings, **other.settings}, self.reasons + other.reasons)

    @property
    def text(self) -> str:
        """As one would write it before a command."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    def __str__(self) -> str:
        return f"{self.text} ({'; '.join(self.reasons)})" if self.settings else "nothing"


def for_sockets(link: Link, user_set: Collection[str], *, prefer: str = "channels") -> Choice:
    """Settings of NCCL's TCP transport.

    Args:
        link: the worst of all pairs of nodes.
        user_set: the variables that are set already, on any rank; each, and what belongs together
            with it, is left alone.
        prefer: "channels", or "helpers" for several connections per channel though small messages
            pay for it.
    """
    if link.flow_cap_bps is None or {"NCCL_NET", "NCCL_NET_PLUGIN"} & set(user_set):
        return Choice()
    # The probe's last step doubled: where that still gained, more connections may gain more.
    flows = link.flows_needed if link.flows_needed < 8 else _flows_for(link)
    helpers_free = not set(HELPERS) & set(user_set)
    channels_free = not {*CHANNELS, "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"} & set(user_set)
    if not helpers_free:
        return Choice()  # the user has chosen how many connections there are
    chosen = Choice()
    if channels_free and prefer == "channels":
        chosen += _channels(link, min(flows, _MAX_CHANNELS))
    elif link.free_cores >= _MIN_HELPER_CORES:
        chosen += _helpers(link, flows)
    if chosen.settings and "NCCL_BUFFSIZE" not in user_set:
        chosen += _buffers(link, flows)
    return chosen


def _flows_for(link: Link) -> int:
    """More connections than were measured: what the best rate would take, and as much again."""
    assert link.flow_cap_bps is not None
    return max(8, min(_MAX_CHANNELS, 2 * round(link.rate_bps / link.flow_cap_bps)))


def _channels(link: Link, flows: int) -> Choice:
    return Choice({"NCCL_MIN_NCHANNELS": str(flows)}, (f"{link}: {flows} connections fill it",))


def _helpers(link: Link, flows: int) -> Choice:
    threads = max(1, min(4, int(link.free_cores) // 2))
    sockets = max(1, -(-min(flows, _MAX_HELPER_SOCKETS) // threads))
    return Choice(
        {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)},
        (f"{link}: {threads * sockets} connections for each channel",),
    )


def _buffers(link: Link, flows: int) -> Choice:
    """Buffers that hold what is in flight, where NCCL's own don't."""
    needed = 2 * link.bytes_in_flight / flows
    size = _DEFAULT_BUFFER_BYTES
    while size < min(needed, _MAX_BUFFER_BYTES):
        size *= 2
    if size == _DEFAULT_BUFFER_BYTES:
        return Choice()
    return Choice(
        {"NCCL_BUFFSIZE": str(size)},
        (f"{link.bytes_in_flight / 2**20:.0f} MiB are in flight on it",),
    )
