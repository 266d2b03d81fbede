"""What OpenGyre services share by meaning: facts, ids, subjects, codec, generated gRPC code."""
