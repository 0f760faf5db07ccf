"""Plain FastAPI under uvicorn with uvloop and httptools: `python -m bench.peers.serve_fastapi PORT WORKERS`.

As its tutorial writes it: a pydantic body for JSON, the model called in the endpoint, as many processes as there are
cores. Nothing batches.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from bench._serve_model import ITEM, make

torch.set_num_threads(1)
model = make()
app = FastAPI()


class Body(BaseModel):
    inputs: list[list[list[list[float]]]]


class Answer(BaseModel):
    outputs: list[list[float]]


@app.post("/predict")
async def predict(body: Body) -> Answer:
    with torch.inference_mode():
        return Answer(outputs=model(torch.tensor(body.inputs)).tolist())


@app.post("/raw")
async def raw(request: Request) -> Response:
    items = np.frombuffer(await request.body(), np.float32, offset=int(request.headers["x-offset"]))
    with torch.inference_mode():
        outputs = model(torch.from_numpy(items.copy()).view(-1, *ITEM))
    return Response(outputs.numpy().tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    port, workers = map(int, sys.argv[1:])
    options = {"log_level": "error", "access_log": False, "timeout_worker_healthcheck": 120}  # torch takes a while
    uvicorn.run("bench.peers.serve_fastapi:app", port=port, workers=workers, **options)
