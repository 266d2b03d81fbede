"""The one event loop of every OpenGyre service: bus, outbox, rpc, clock, telemetry, config."""
