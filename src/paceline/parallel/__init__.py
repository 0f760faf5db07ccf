"""How one replica is cut: what its numbers are and where its parts lie. How replicas agree is for `strategies`."""
