# The engine of the core's cell is killed and cannot be started again for a quarter of an hour. It will not say that it is off the devices,
# which nobody holds: the core takes them, trains, and the run comes to its end on the other cell.
run schedule=elastic cells=2 steps=3 groups=2 phi=0 seed=3
after burst.opened burst=0 kill engine-0 for 900
expect cell.train.joined cell=0 epoch=1
expect cell.rollout.lost cell=0 epoch=2
expect cell.train.joined cell=0 epoch=3
expect cell.rollout.lost cell=0 epoch=4
expect step.finished step=2
closes completed
