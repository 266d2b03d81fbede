"""The run: bursts, dispatch, waterlevel, the role of every cell."""
