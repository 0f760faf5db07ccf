"""Online inference that follows the training.

Versions come from a source (`sources`) to the keeper in the parent, from there to the shelf, and are swapped in by each
replica between two batches. Read keeper.py first, then shelf.py and swap.py.
"""
