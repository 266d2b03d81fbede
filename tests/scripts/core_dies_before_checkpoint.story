# The core dies after it has said that a step is finished and before the weights are in a checkpoint: the step is trained
# again by a new attempt (and so is everything begun after it), from the version before, with the same members; then its weights are published, once.
run schedule=colocate cells=2 steps=2 seed=5
after step.finished step=0 kill trainer-0 for 6
expect step.sealed step=0
expect step.finished step=0 attempt=0
expect weights.published version=1
expect step.finished step=1 attempt=1
expect weights.published version=2
closes completed
