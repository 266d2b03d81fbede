#!/bin/sh
# Makes .venv-harness with the third-party agent that `make test-harness` drives. It stays apart because its
# dependencies are its own affair: the services never import it, they only start it as a process.
set -eu
cd "$(dirname "$0")/.."

pin=mini-swe-agent==2.4.6
venv=.venv-harness
if [ "$(cat $venv/.setup-done 2>/dev/null)" = "$pin" ]; then
    exit 0
fi
printf '==> installing %s into %s\n' "$pin" "$venv"
rm -rf $venv
.venv/bin/python -m venv $venv
$venv/bin/python -m pip install --quiet --disable-pip-version-check "$pin"
printf '%s' "$pin" > $venv/.setup-done
