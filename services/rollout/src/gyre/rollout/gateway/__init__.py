"""What a harness talks to: dialects, sessions, rendering, call records."""
