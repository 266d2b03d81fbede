"""One-sided reads of registered memory between processes: shared memory on one host, TCP between hosts."""

from gyre.transfer.backend import host_identity
from gyre.transfer.describe import Address, BufferInfo, NixlTarget, RegionDescriptor, checksum
from gyre.transfer.errors import (
    BackendUnavailable,
    ChecksumMismatch,
    DeadlineExceeded,
    LayoutMismatch,
    RegionUnknown,
    StaleGeneration,
    TornRead,
    TransferError,
)
from gyre.transfer.region import Region
from gyre.transfer.rows import MAX_ROWS, row_checksum
from gyre.transfer.transfer import Transfer, TransferConfig, backends_of

__all__ = [
    "Address",
    "BackendUnavailable",
    "BufferInfo",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "LayoutMismatch",
    "MAX_ROWS",
    "NixlTarget",
    "Region",
    "RegionDescriptor",
    "RegionUnknown",
    "StaleGeneration",
    "TornRead",
    "Transfer",
    "TransferConfig",
    "TransferError",
    "backends_of",
    "checksum",
    "host_identity",
    "row_checksum",
]
