# A leader hears everything and what it says does not get out: it says that a burst is over or what comes next, its lease
# ends, another one takes over and says the same. What the first had on its way arrives later and is refused.
run schedule=elastic cells=2 steps=2 groups=3 seed=11
after step.finished step=0 mute leader for 14
expect lease.taken holder=scheduler-0.1
expect burst.opened burst=0
expect step.finished step=0
expect weights.published version=1
expect lease.taken holder=scheduler-1.1
expect cell.role.assigned cell=0 role=rollout
expect burst.opened burst=1
expect step.finished step=1
closes completed
