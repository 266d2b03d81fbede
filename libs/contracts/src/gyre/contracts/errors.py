"""Errors named by the boundary that was crossed.

GyreError
 +- ConfigError          a configuration value is wrong; the message names key, value and what would be right
 +- InvalidId            a name cannot be used as a subject token or a file name
 +- ContractError        a message cannot be understood
 |   +- UnknownType      its type is not in the table of this release
 |   +- BrokenBody       its body does not fit the record of its type
 |   +- MessageTooLarge  it would not fit into one NATS message
 +- BusError             NATS refused or lost something for good
 |   +- Fenced           a conditional publish lost: somebody else wrote first
 +- EngineError          an inference engine failed a request
 +- HarnessError         a harness could not be started or adopted
 +- SandboxError         the sandbox is missing or refused
 +- EvaluationError      an evaluator failed; never a score
 +- TransferError        a one-sided read failed, timed out or read another generation
 +- CheckpointError      a checkpoint is missing, torn or does not match its digest
"""


class GyreError(Exception):
    """Root of every error that OpenGyre raises on purpose."""


class ConfigError(GyreError):
    """A configuration value is wrong."""


class InvalidId(GyreError, ValueError):
    """A name cannot be used as a subject token or a file name."""


class ContractError(GyreError):
    """A message cannot be understood."""


class UnknownType(ContractError):
    """The message's type is not in the table of this release."""


class BrokenBody(ContractError):
    """The message's body does not fit the record of its type."""


class MessageTooLarge(ContractError):
    """The message does not fit into one NATS message; it has to go by reference."""


class BusError(GyreError):
    """NATS refused or lost something for good."""


class Fenced(BusError):
    """A conditional publish lost: somebody else wrote first."""


class EngineError(GyreError):
    """An inference engine failed a request."""


class HarnessError(GyreError):
    """A harness could not be started or adopted."""


class SandboxError(GyreError):
    """The sandbox is missing or refused."""


class EvaluationError(GyreError):
    """An evaluator failed; this is never a score."""


class TransferError(GyreError):
    """A one-sided read failed, timed out or met another generation."""


class CheckpointError(GyreError):
    """A checkpoint is missing, torn or does not match its digest."""
