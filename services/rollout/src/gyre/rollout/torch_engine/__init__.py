"""The built-in engine's parts: scheduler, block cache, runner, sampler. `gyre.rollout.engines.torch` drives them."""
