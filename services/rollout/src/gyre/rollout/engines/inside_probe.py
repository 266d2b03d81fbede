"""What an environment has, told by its own interpreter and without importing any of it.

    python -I inside_probe.py '{"distributions": [...], "modules": [...], "routes": {"PACKAGE": [...]}}'

An import of vLLM or SGLang takes tens of seconds; a look at the files takes less than one. It imports nothing of OpenGyre,
and any Python an engine runs on must read it.
"""

import json
import re
import runpy
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path


def version_of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def spec_of(name):
    """Of a module; its packages are walked and not run, as `importlib.util.find_spec` would."""
    spec, where, path = None, None, ""
    for part in name.split("."):
        path = path + "." + part if path else part
        spec = PathFinder.find_spec(path, where)
        if spec is None:
            return None
        where = spec.submodule_search_locations or []
    return spec


def routes_in(package, routes):
    """Those of `routes` that stand, in quotes, in the source of a package."""
    spec, found = spec_of(package), set()
    for folder in spec.submodule_search_locations or [] if spec else []:
        for file in Path(folder).rglob("*.py"):
            text = file.read_text(errors="replace")
            found.update(r for r in set(routes) - found if re.search("[\"']" + re.escape(r) + "[\"']", text))
    return found


def accelerator():
    """What torch was built for: a version of CUDA or ROCm, None for a CPU build or no torch."""
    spec = spec_of("torch.version")
    if spec is None or not spec.origin:
        return None
    built = runpy.run_path(spec.origin)
    return built.get("cuda") or built.get("hip")


def main():
    wanted = json.loads(sys.argv[1])
    lacks = [route for package, routes in wanted["routes"].items() for route in set(routes) - routes_in(package, routes)]
    print(json.dumps({
        "versions": {name: version_of(name) for name in wanted["distributions"]},
        "modules": [name for name in wanted["modules"] if spec_of(name) is not None],
        "lacks_routes": sorted(lacks),
        "accelerator": accelerator(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
