# An engine is started again at once and answers, but cannot wake (its devices are broken, say); another one cannot take the
# new weights. After a while both are said to be lost and the run goes on without them.
run schedule=elastic cells=3 steps=3 groups=2 phi=0 seed=3
after execution.started refuse engine-2 for 200
after execution.started kill engine-2 for 2
after step.finished step=0 refuse engine-1 for 200
expect cell.rollout.lost cell=2
expect cell.rollout.lost cell=1
expect step.finished step=2
expect run.closed
closes completed
