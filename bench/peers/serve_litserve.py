"""LitServe with batches: `python -m bench.peers.serve_litserve PORT WORKERS BATCH TIMEOUT_S API_SERVERS`.

It reads the types of decode_request, so they are no strings here.
"""

import sys
from typing import Any

import litserve
import torch

from bench._serve_model import make


class Json(litserve.LitAPI):
    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.model = make()

    def decode_request(self, request: dict) -> torch.Tensor:
        return torch.tensor(request["inputs"])

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(inputs)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(x)

    def unbatch(self, output: torch.Tensor) -> list[torch.Tensor]:
        return list(output.split(1))

    def encode_response(self, output: torch.Tensor) -> Any:
        return {"outputs": output.tolist()}


if __name__ == "__main__":
    port, workers, batch = map(int, sys.argv[1:4])
    api = Json(max_batch_size=batch, batch_timeout=float(sys.argv[4]))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers, fast_queue=True)
    server.run(
        port=port, num_api_servers=int(sys.argv[5]), log_level="error", generate_client_file=False, access_log=False
    )
