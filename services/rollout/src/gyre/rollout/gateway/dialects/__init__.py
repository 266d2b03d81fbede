"""Wire formats of model APIs; each is a pure translation to and from `gyre.rollout.gateway.messages`."""
