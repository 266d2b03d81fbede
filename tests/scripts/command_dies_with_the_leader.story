# Two schedulers die one after the other before they have said that the run is open, as they were asked to. Who asked was not
# answered, so it asks the next one; answered at once, it would wait for ever for a run that nobody opens.
run schedule=elastic cells=2 steps=2 groups=2 seed=8
at 0 crash scheduler-0 point 1
at 0 crash scheduler-1 point 1
expect lease.taken holder=scheduler-1.1
expect lease.taken holder=scheduler-0.1
expect lease.taken holder=scheduler-1.3
expect run.opened opening=0
closes completed
