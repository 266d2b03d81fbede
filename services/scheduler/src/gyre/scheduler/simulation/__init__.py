"""Discrete events around the scheduler's real core: what a run would cost, without running it.

constants.py   what is assumed of engines, trainer and transitions     workload.py   how long executions take
agenda.py      virtual time                                            engines.py    executions on the rollout cells
trainer.py     groups, steps, claims                                   world.py      everything together, around the core
measures.py    where the time of every cell went                       bounds.py     what no schedule can beat
sweep.py       bursts of equal staleness, best against best
"""
