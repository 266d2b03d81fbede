"""One filled example of every fact; the golden bytes are made of them."""

import numpy as np
from gyre.contracts import events as e
from gyre.contracts.digest import token_digest

BLOB = e.BlobRef("workspaces/g00001-000-x00.tar", "0" * 32, 2048)
SPEC = e.ExecutionSpec("g00001-000-x00", 7, 60.0, 120.0, 5)
MICRO = e.MicroStepRef("g00001-000-m000", "1" * 32, 12.5, 100, 20, 2, BLOB)
OUTCOME = e.Outcome("g00001-000-x00", "scored", "timed_out", 0.5, -0.25, 11, 40, 36, {"max_paths": 4}, 120, 480, 60,
                    roles={"main": e.RoleCounts(10, 48, 2, 32), "main-summary": e.RoleCounts(1, 12, 1, 4)},
                    num_unknown_roots=1)
CALL = e.CallRecorded(
    execution="g00001-000-x00", group="g00001-000", call="g00001-000-x00-c0001", index=1, base_call="g00001-000-x00-c0000",
    keep_len=3, prompt_len=5, prompt_delta=np.array([8, 9], np.int32), output_ids=np.array([4, 2], np.int32),
    logprobs=np.array([-0.5, -0.25], np.float32), behaviour_logprobs=np.array([-0.5, -0.25], np.float32),
    spans=(e.VersionSpan(0, 1, 3), e.VersionSpan(1, 2, 4)), finish_reason="stop",
    digest=token_digest(np.array([1, 2, 3, 8, 9, 4, 2])), sampling=e.Sampling(1.0, 1.0, 0, 7), cell=1,
    evidence=e.CallEvidence({"x-codex-turn-metadata": "{}"}, "g00001-000-x00-c0000", ("g00001-000-x00-c0000",), None))

SAMPLES: tuple[e.Fact, ...] = (
    e.LeaseTaken("abc", 2, 5.0), e.RunOpened("d" * 32, 1, 2, num_standalone=1, schedule="elastic"),
    e.RunStopRequested("asked to stop", 0),
    e.RunClosed("completed", 60), e.BurstOpened(3, 3, 1),
    e.BurstClosed(3, 4), e.GroupDispatched("g00001-000", 1, "train-0001", "train/0001", "train", 3, (SPEC,)),
    e.CellRoleAssigned(1, 4, "train", "cell-1-epoch-4", 3, "no answer"),
    e.ExecutionStarted("g00001-000-x00", "g00001-000", "train", 3),
    e.ExecutionTerminated("g00001-000-x00", "g00001-000", "train-0001", "train", "timed_out", 4, 1.5, BLOB, "calls",
                          undelivered=("g00001-000-x00-c0003",), max_context=9000),
    e.ContextsReported(7, {"g00001-000-x00": 8192}),
    e.EvaluationRequested("g00001-000-x00", "g00001-000", "train-0001", "train/0001", "train", "timed_out", BLOB),
    CALL, e.CellRolloutReleased(1, 4), e.CellRolloutReady(1, 5, 4, "c" * 32, 1),
    e.CellRolloutLost(1, 5, 1, "cannot be reached"),
    e.ExecutionScored("g00001-000-x00", "g00001-000", 0.5, 3, 6, "evaluator-0", metrics={"seconds": 0.25}),
    e.ExecutionUnscorable("g00001-000-x01", "g00001-000", "worker died", "evaluator-1", 3),
    e.GroupCompleted("g00001-000", 1, "train-0001", "train", 3, (OUTCOME,), 1, 0.5, 0.0, (MICRO,),
                     signal="one_vote"),
    e.StepSealed(3, ("g00001-000",), ("g00001-000-m000",), 1),
    e.StepFinished(3, 4, 0, True, 1, 36, 120, 0.125, 0.5, 1e-3, {"ratio": 1.0}, {"0": 1}, ("g00001-000-x00",)),
    e.WeightsPublished(4, "c" * 32, 3, "checkpoints/v4", "core:1"), e.CellTrainJoined(1, 4, 3, 3),
    e.CellTrainReleased(1, 5, 4), e.BacklogReported(9, 3, 2, 1.5, 0.25, 100.0),
    e.DeadLettered("GYRE_EXEC", "gyre.v1.exec.r.x.y", 12, "trajectory", "BrokenBody: no", b"\xc1"),
)
