# Retries arrive when the server has long forgotten their ids: facts are stored twice, and each counts once.
run schedule=elastic cells=2 steps=3 groups=2 phi=1 seed=4
after group.completed again group.completed
after group.completed 3 again group.completed 2
after execution.terminated 2 again execution.terminated
after step.sealed step=0 again group.completed
after cell.role.assigned cell=0 role=rollout again cell.role.assigned 2
after weights.published version=1 again weights.published 2
expect group.completed
expect group.completed
expect step.sealed step=0
expect step.sealed step=1
expect step.sealed step=2
closes completed
