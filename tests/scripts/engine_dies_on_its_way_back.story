# A satellite's engine is killed for minutes as its cell is told to come back from training: it is said to be lost, as one that
# served would be, and the next burst is dispatched to the others long before the transition's own deadline.
run schedule=elastic cells=3 steps=3 groups=3 executions=3 phi=0 seed=4
after cell.role.assigned cell=1 role=rollout kill engine-1 for 200
expect cell.role.assigned cell=1 role=rollout
expect cell.rollout.lost cell=1
expect step.finished step=2
expect run.closed
closes completed
