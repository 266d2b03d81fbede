"""One-sided reads of registered memory between processes: shared memory on one host, TCP between hosts."""

from gyre.transfer.backend import host_identity
from gyre.transfer.describe import Address, BufferInfo, RegionDescriptor, checksum
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
from gyre.transfer.transfer import Transfer, TransferConfig

__all__ = [
    "Address",
    "BackendUnavailable",
    "BufferInfo",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "LayoutMismatch",
    "Region",
    "RegionDescriptor",
    "RegionUnknown",
    "StaleGeneration",
    "TornRead",
    "Transfer",
    "TransferConfig",
    "TransferError",
    "checksum",
    "host_identity",
]
