"""What a collective costs on a network, and so which way of doing it to take.

The model is the usual one: a message takes a latency and its bytes over the bandwidth [1]. The ring
measures both when it is formed; all members use the same two numbers, so all choose alike. n members, B
bytes:

    ring       2(n−1) steps of B/n bytes, cut into pieces that are passed on as they come: a step takes the longer
               of sending its bytes and of one piece's way                                bandwidth-optimal
    doubling   log₂ n rounds of B bytes, two more where n is not a power of two           latency-optimal
    chain      broadcast from member to member in pieces;   tree: log₂ n rounds of B bytes
    direct     everyone sends to everyone else at once, (n−1) messages of B bytes

[1] R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH,
2005.
"""

from __future__ import annotations

import math

import msgspec


class Link(msgspec.Struct, frozen=True):
    """The slowest link between two members.

    >>> lan, wan = Link(latency_s=1e-4, bytes_per_s=125e6), Link(latency_s=1e-2, bytes_per_s=125e6)
    >>> lan.ring_s(4, 25_000_000) < lan.doubling_s(4, 25_000_000)
    True
    >>> wan.ring_s(4, 100_000) < wan.doubling_s(4, 100_000)
    False
    """

    latency_s: float  # one way, everything included, of a message of a few bytes
    bytes_per_s: float
    piece_bytes: int = 1 << 19  # at most, and a multiple of 16

    def seconds(self, nbytes: float) -> float:
        """To put so many bytes on the wire."""
        return nbytes / self.bytes_per_s

    def piece(self, nbytes: int) -> int:
        """How many bytes of a step travel as one: enough pieces to hide the latency, not so many as to cost."""
        least = min(self.piece_bytes, 1 << 16)
        return min(self.piece_bytes, max(least, nbytes // 64 * 16))

    def steps_s(self, steps: int, nbytes: float) -> float:
        """Steps of `nbytes` each along the ring, each passing on what the one before brought, by pieces."""
        step_s = self.seconds(nbytes)
        first_piece_s = self.latency_s + self.seconds(min(nbytes, self.piece(int(nbytes))))
        return (steps - 1) * max(step_s, first_piece_s) + self.latency_s + step_s

    def ring_s(self, size: int, nbytes: float) -> float:
        """All-reduce by scatter-reduce and all-gather."""
        return self.steps_s(2 * (size - 1), nbytes / size)

    def doubling_s(self, size: int, nbytes: float) -> float:
        """All-reduce by recursive doubling."""
        return doubling_rounds(size) * (self.latency_s + self.seconds(nbytes))

    def all_reduce_s(self, size: int, nbytes: float) -> float:
        """By the faster of the two."""
        return min(self.ring_s(size, nbytes), self.doubling_s(size, nbytes))

    def direct_s(self, size: int, nbytes: float) -> float:
        """All-gather, or all-to-all, of messages of so many bytes."""
        return self.latency_s + (size - 1) * self.seconds(nbytes)

    def chain_s(self, size: int, nbytes: float) -> float:
        """Broadcast along the ring."""
        piece = min(nbytes, self.piece(int(nbytes)))
        return (size - 2) * (self.latency_s + self.seconds(piece)) + self.latency_s + self.seconds(nbytes)

    def tree_s(self, size: int, nbytes: float) -> float:
        """Broadcast by a binomial tree."""
        return math.ceil(math.log2(size)) * (self.latency_s + self.seconds(nbytes))


def doubling_rounds(size: int) -> int:
    """
    >>> [doubling_rounds(n) for n in (2, 3, 4, 5, 8)]
    [1, 3, 2, 4, 3]
    """
    whole = size.bit_length() - 1
    return whole if size == 1 << whole else whole + 2
