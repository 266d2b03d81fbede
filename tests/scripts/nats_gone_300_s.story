# NATS is gone for five minutes in the middle of a burst: harnesses go on and end, facts wait in the outboxes, all of them
# are told afterwards, and somebody takes the lease again.
run schedule=elastic cells=2 steps=2 groups=2 seed=9 window_s=120
after execution.started 2 down nats for 300
expect execution.started
expect execution.terminated
expect step.finished step=0
expect step.finished step=1
closes completed
