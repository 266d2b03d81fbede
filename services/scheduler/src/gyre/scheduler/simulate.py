"""`python -m gyre.scheduler.simulate`: reads one request as JSON, writes each simulated run as a line of JSON.

`gyre simulate` starts it; a request that cannot be is answered by its reason on standard error and code 2.
"""

import sys
import tomllib

import msgspec
from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import SimulationRequest
from gyre.runtime.config import RunConfig
from gyre.runtime.settings import parse
from gyre.scheduler.simulation.constants import Constants
from gyre.scheduler.simulation.sweep import simulate


def main() -> int:
    """Answer the request on standard input; returns the exit code."""
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=SimulationRequest)
        config = parse(tomllib.loads(request.config), RunConfig, "run.toml")
        constants = parse(tomllib.loads(request.constants), Constants, "the constants file")
        for run in simulate(request, config, constants):
            sys.stdout.buffer.write(msgspec.json.encode(run) + b"\n")
            sys.stdout.flush()
    except (ConfigError, msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
