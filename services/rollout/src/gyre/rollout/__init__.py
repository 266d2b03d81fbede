"""Executions and engines: harness processes, workspaces, the gateway, engine backends."""
