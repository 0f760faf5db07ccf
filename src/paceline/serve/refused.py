"""A request that is not answered with a result: the status of HTTP and a sentence that says why."""

from __future__ import annotations


class Refused(Exception):
    """`retry_after_s`: when it is worth asking again; 0: not as it is."""

    def __init__(self, status: int, why: str, *, retry_after_s: int = 0) -> None:
        super().__init__(why)
        self.status = status
        self.why = why
        self.retry_after_s = retry_after_s
