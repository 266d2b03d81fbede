# The core is cut off from NATS just after it took its devices, for so long that it is sent back and told to train again
# meanwhile. It hears of both at once, holding the devices from the first time: it has to say that it joins the second time too,
# or everybody waits until that is given up.
run schedule=elastic cells=2 steps=3 groups=2 phi=0 seed=7 transition_s=90
at 11.53 cut trainer-0 nats for 200
expect cell.role.assigned cell=0 epoch=2 role=rollout
expect cell.role.assigned cell=0 epoch=3 role=train
expect cell.train.joined cell=0 epoch=1
expect cell.train.joined cell=0 epoch=3
closes completed
