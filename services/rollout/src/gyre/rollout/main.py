"""`gyre-rollout serve` (gateway, router, executor) and `gyre-rollout engine --cell N` (one engine)."""

import argparse

from gyre.runtime import process


def main() -> None:
    """Entry point. Each command imports its own half: `serve` never loads torch."""
    parser = argparse.ArgumentParser(prog="gyre-rollout", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    process.add_arguments(commands.add_parser("serve", help="gateway, router and executor"))
    process.add_arguments(commands.add_parser("engine", help="one engine of one cell"), "cell")
    arguments = parser.parse_args()
    if arguments.command == "engine":
        from gyre.rollout.engine_process import serve_engine

        process.run(serve_engine, "rollout", "engine", arguments)
    else:
        from gyre.rollout.serve import serve

        process.run(serve, "rollout", "rollout", arguments)


if __name__ == "__main__":
    main()
