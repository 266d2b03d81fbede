"""What can go wrong in a transfer; every reader error leaves the destination arrays undefined."""

from gyre.contracts.errors import TransferError

__all__ = [
    "BackendUnavailable",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "LayoutMismatch",
    "RegionUnknown",
    "StaleGeneration",
    "TornRead",
    "TransferError",
]


class BackendUnavailable(TransferError):
    """No configured backend reaches the descriptor's memory, or a backend is not part of this build."""


class RegionUnknown(TransferError):
    """The owner does not (or no longer) serve this region: it was released, or its process is gone."""


class StaleGeneration(TransferError):
    """The region holds another generation than the descriptor names, or is being rewritten."""


class TornRead(TransferError):
    """The owner rewrote the region while it was being read."""


class ChecksumMismatch(TransferError):
    """The bytes that arrived are not the bytes that were described."""


class DeadlineExceeded(TransferError):
    """The read did not end in the time it was given."""


class LayoutMismatch(TransferError):
    """A destination array has another dtype, shape or memory order than the buffer it is for."""
