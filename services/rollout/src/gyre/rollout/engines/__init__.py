"""Engine backends behind one neutral contract (`gyre.rollout.engines.base`)."""
