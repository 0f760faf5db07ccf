"""What proves a run: clusters of real processes, hosts made of namespaces, faults by plan, and ledgers that judge."""
