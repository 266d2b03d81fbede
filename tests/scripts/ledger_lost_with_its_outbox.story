# The core cannot speak while it seals and trains; then its SQLite file is lost, with all that waited
# in its outbox. The checkpoint's copy of the ledger knows what was sealed, and it is said after all. (Found by seed 114.)
run schedule=elastic cells=1 steps=2 groups=1 phi=1 seed=3
after step.sealed step=0 mute trainer-0 for 35
at 40 lose trainer-0 for 2
expect step.sealed step=0
expect step.sealed step=1
closes completed
