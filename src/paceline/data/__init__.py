"""Which samples, in which order, exactly once: partitions, the sampler, and the loader that fetches ahead."""

from paceline.data.files import Files
from paceline.data.loader import Loader
from paceline.data.partition import Blocks, ByFile, ByKey, Columns, Contiguous, Partition, Shuffled, Strided

__all__ = [
    "Blocks",
    "ByFile",
    "ByKey",
    "Columns",
    "Contiguous",
    "Files",
    "Loader",
    "Partition",
    "Shuffled",
    "Strided",
]
