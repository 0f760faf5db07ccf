"""What `paceline serve` was asked for: from the command line, through the private directory, to the replicas."""

from __future__ import annotations

import msgspec

JSON = "application/json"
SAFETENSORS = "application/x-safetensors"
PRECISIONS = ("fp32", "bf16", "int8")
FORMS = ("auto", "eager", "compile", "export")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value per option; 0 where a measurement decides."""

    name: str = "Paceline serve"  # of what is served, for the page
    model: str  # FILE:FUNCTION or package.module:FUNCTION, which makes the module
    inputs: tuple[tuple[tuple[int, ...], str], ...] = ()  # of one item per argument; (): as example_inputs() says
    label: tuple[tuple[int, ...], str] = ((), "int64")  # of one item, for /learn: the number of a class
    replicas: int = 1
    threads: int = 0  # per replica
    max_batch_size: int = 32  # in items
    max_queue_delay_us: int = 0  # how long a batch that is not full waits for more
    queue_limit: int = 1024  # items that may wait in a replica
    deadline_ms: float = 10_000.0
    max_body_bytes: int = 16 << 20
    device: str = "cpu"  # where replicas compute; the parent's copy of the model stays in host memory
    precision: str = "fp32"
    compile: str = "eager"
    token: str = ""  # "": anybody may ask
    drain_s: float = 30.0
