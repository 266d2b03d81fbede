# A leader is cut off while it says that a burst is open and what is dispatched. Another one takes over after the lease's
# time; what the first had on its way arrives later and is refused. Every group is dispatched once.
run schedule=elastic cells=2 steps=2 groups=3 seed=11
after burst.opened cut leader nats for 14
after burst.opened 2 pause leader for 14
expect lease.taken term=1
expect burst.opened burst=0
expect lease.taken term=1
expect group.dispatched group=g00000-001
expect step.finished step=0
expect burst.opened burst=1
expect lease.taken term=1
expect step.finished step=1
closes completed
