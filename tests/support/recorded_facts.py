"""What a tiny run of one step said, with the seconds at which it did."""

from __future__ import annotations

from gyre.contracts import events as e

REF = e.BlobRef("b", "d", 1)


def recorded_facts() -> list[tuple[e.Fact, float]]:
    """Two groups of two executions, one step on two cells: dispatched at 100, ended at 110 and 130, trained from 131 to 141."""
    said: list[tuple[e.Fact, float]] = []
    said.append((e.RunOpened("d", 0, 2), 99.0))
    for g in range(2):
        name, specs = f"g00000-00{g}", tuple(e.ExecutionSpec(f"g00000-00{g}-x0{i}", 0, 60.0, 120.0) for i in range(2))
        said.append((e.GroupDispatched(name, 0, "q", "train/t", "train", 0, specs), 100.0))
        for i, spec in enumerate(specs):
            said.append((e.ExecutionTerminated(spec.execution, name, "q", "train", "finished", 3, 8.0, max_context=500 + i),
                        110.0 + 20 * i))
            said.append((e.ExecutionScored(spec.execution, name, 1.0, 1, 1, "e"), 110.5 + 20 * i))
        steps = (e.MicroStepRef(f"{name}-m000", "d", 10.0, 1, 1, 2, REF),)
        said.append((e.GroupCompleted(name, 0, "q", "train", 0, (), 2, 1.0, 0.0, steps), 130.6))
    for cell in range(2):
        said.append((e.CellRoleAssigned(cell, 1, "train", "t", 0), 130.0))
        said.append((e.CellRolloutReleased(cell, 1), 130.3))
        said.append((e.CellTrainJoined(cell, 1, 0, 0), 130.8))
    said.append((e.StepSealed(0, ("g00000-000", "g00000-001"), (), 4), 131.0))
    said.append((e.StepFinished(0, 1, 0, True, 4, 1, 1, 0.0, 0.0, 0.0), 141.0))
    said.append((e.WeightsPublished(1, "c", 0, "k"), 141.25))
    return said
