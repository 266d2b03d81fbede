# The core lets go of its devices and loses its SQLite file; on a bad line it reads of the assignment before, and only later
# of the one that sent it back. It has said that it let go and never says it twice: it must not take the devices again, or
# the engine waits for them for ever. (Found by seed 5112.)
run schedule=elastic cells=2 steps=2 groups=2 phi=0 seed=3
after cell.role.assigned cell=0 role=rollout kill engine-0 for 12
after cell.train.released cell=0 lossy 0.3 for 10
after cell.train.released cell=0 lose trainer-0 for 1
expect cell.rollout.ready cell=0 epoch=2
closes completed
