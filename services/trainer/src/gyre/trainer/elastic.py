"""A cell's worker joins and leaves training: the pure rule.

The scheduler assigns `train` at epoch e; the engine releases the devices at epoch e; the worker takes them and says
joined. At the burst's end the scheduler assigns `rollout` at a newer epoch; the worker lets go and says released. An
epoch that is not newer than one seen is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.contracts.events import CellRoleAssigned, CellRolloutReleased, Role


@dataclass(slots=True)
class CellState:
    """What the facts say of this worker's cell; part of the durable state.

    assigned: epoch and role of the newest assignment. rollout_released: newest epoch the engine let go at.
    joined, released: newest epochs this worker took or gave back the devices at. trained: newest epoch of role `train`.
    """

    epoch: int = 0
    role: Role = "rollout"
    rollout_released: int = -1
    joined: int = -1
    released: int = -1
    trained: int = -1

    def assign(self, fact: CellRoleAssigned) -> None:
        if fact.epoch > self.epoch:
            self.epoch, self.role = fact.epoch, fact.role
            if fact.role == "train":
                self.trained = fact.epoch

    def engine_released(self, fact: CellRolloutReleased) -> None:
        self.rollout_released = max(self.rollout_released, fact.epoch)

    def let_go(self, epoch: int) -> None:
        """It was said that this worker is off the devices since `epoch`.

        That is said only of a cell that was sent back to rollout, so whoever knows no more than this (the ledger was lost)
        does not take the devices again when it reads of the assignments before.
        """
        self.released = max(self.released, epoch)
        if epoch > self.epoch:
            self.epoch, self.role = epoch, "rollout"

    @property
    def should_hold(self) -> bool:
        """Training is this cell's role and the engine is off the devices."""
        return self.role == "train" and not self.waits_for_engine

    @property
    def waits_for_engine(self) -> bool:
        """Training is this cell's role, and the engine has not said that it is off the devices."""
        return self.role == "train" and self.rollout_released < self.epoch

    @property
    def has_joined(self) -> bool:
        """It was said at this very epoch: who still holds the devices from an earlier one has not."""
        return self.joined >= self.epoch

    @property
    def owes_release(self) -> bool:
        """The cell is back in rollout, and the engine waits for our word, also if we never came to join."""
        return self.role == "rollout" and self.trained > self.released
