"""The whole job, once for every door: `rankwise.compress`, the command line, studies and training use `Compression`."""

from rankwise.compression.basis import Basis, Observations
from rankwise.compression.by_block import BlockCompression
from rankwise.compression.job import Compression
from rankwise.compression.one_call import compress
from rankwise.compression.request import Request

__all__ = ["Basis", "BlockCompression", "Compression", "Observations", "Request", "compress"]
