# The only engine breaks for good when everything is trained: there is nothing left to serve, and the run closes.
run schedule=elastic cells=1 steps=2 groups=2 seed=5 transition_s=90
after weights.published version=2 kill engine-0 for 300
expect step.finished step=1
expect cell.role.assigned cell=0 role=rollout
expect burst.closed burst=1
expect run.closed
never cell.rollout.ready cell=0 version=2
closes completed
