# The engine of a cell dies for good, and the rollout service is started again before it has missed it for long enough. The
# new one has never seen that engine serve, but the one before said that it does: it has to say that it is lost, or the
# scheduler waits for ever for a cell that it believes to be well.
run schedule=elastic cells=2 steps=3 groups=2 phi=0 seed=3
after cell.rollout.ready cell=1 kill engine-1 for 200
after cell.rollout.ready cell=1 kill rollout for 2
expect cell.rollout.lost cell=1
expect step.finished step=2
expect run.closed
never cell.rollout.ready cell=1 version=1
closes completed
