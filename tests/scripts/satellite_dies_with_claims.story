# Satellites die or fall silent with claims in hand, one more than once: what they had is computed by others.
run schedule=colocate cells=4 steps=2 groups=3 executions=3 seed=2
after cell.train.joined cell=1 kill trainer-1 for 20
after cell.train.joined cell=2 pause trainer-2 for 25
after cell.train.joined cell=3 cut trainer-3 trainer-0 for 25
expect cell.train.joined cell=1 epoch=1
expect step.finished step=0
expect cell.train.released cell=1
expect step.finished step=1
closes completed
