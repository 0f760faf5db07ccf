"""mosec with batches: `python -m bench.peers.serve_mosec --port PORT`; WORKERS, BATCH, WAIT_MS, KIND are variables.

Its default reader of JSON is the standard library's; here it gets msgspec, which is faster, and which its own mixins
use.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
import torch
from mosec import Server, Worker

from bench._serve_model import ITEM, make


class Body(msgspec.Struct):
    inputs: list[list[list[list[float]]]]


class Model(Worker):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model = make()

    def forward(self, data: list[Any]) -> list[Any]:
        with torch.inference_mode():
            return list(self.model(torch.from_numpy(np.concatenate(data))).split(1))


class Json(Model):
    decoder = msgspec.json.Decoder(Body)

    def deserialize(self, data: bytes) -> Any:
        return np.array(self.decoder.decode(data).inputs, np.float32)

    def serialize(self, data: Any) -> bytes:
        return msgspec.json.encode({"outputs": data.tolist()})


class Raw(Model):
    resp_mime_type = "application/octet-stream"

    def deserialize(self, data: bytes) -> Any:
        offset = 8 + int.from_bytes(data[:8], "little")
        return np.frombuffer(data, np.float32, offset=offset).reshape(-1, *ITEM)

    def serialize(self, data: Any) -> bytes:
        return data.numpy().tobytes()


if __name__ == "__main__":
    server = Server()
    options = {
        "num": int(os.environ["WORKERS"]),
        "max_batch_size": int(os.environ["BATCH"]),
        "max_wait_time": int(os.environ["WAIT_MS"]),
    }
    server.append_worker(Raw if os.environ["KIND"] == "raw" else Json, route="/predict", **options)
    server.run()
