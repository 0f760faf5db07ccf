"""Online inference: `paceline serve` answers requests with a model, and follows its training.

A parent (`house`) accepts connections and gives each to one of several replicas (`replica`), which are processes with
their own model, event loop and batcher. In a replica a request goes `fast_lane` or `app` -> `predict` -> `bodies` ->
`batcher` -> `engine` and back. Versions come from a source to the keeper in the parent, from there to the shelf, and
are swapped in by each replica between two batches.

Read predict.py first, then batcher.py and house.py. Needs the extra `serve` (FastAPI, uvicorn); nothing here is
imported by the rest of Paceline but the command.
"""
