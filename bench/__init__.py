"""Measurements of Paceline beside its peers: `python -m bench.NAME [--quick] [--json FILE]`."""
