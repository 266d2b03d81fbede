"""The built-in engine's parts; `gyre.rollout.engines.torch` drives them, `build.py` makes one from a configuration.

What is computed next: `scheduler.py` over `sequence.py`, `cache.py` (which block holds what), `recent.py` (what waits).
How: `runner.py` or, for equal bits, `tiles.py`, over `kv.py` (the memory); then `sampler.py`. `policies.py` makes models,
`probe.py` checks them. How requests move: `moves.py` (tickets and leases), `tickets.py` (what they hold), `shipping.py`
(bytes).
"""
