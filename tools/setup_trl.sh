#!/bin/sh
# Makes .venv-trl with TRL, beside whose losses `make test-trl` puts ours. It stays apart because nothing here imports it.
set -eu
cd "$(dirname "$0")/.."

trl=trl==1.16.0
torch=$(grep '^torch==' constraints.txt)
pins="$trl $torch $(grep '^transformers==' constraints.txt)"
venv=.venv-trl
if [ "$(cat $venv/.setup-done 2>/dev/null)" = "$pins" ]; then
    exit 0
fi
printf '==> installing %s into %s\n' "$trl" "$venv"
rm -rf $venv
.venv/bin/python -m venv $venv
install() { $venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
# The CPU build, from a folder of wheels or PyTorch's own index; PyPI's Linux build brings gigabytes of CUDA libraries.
install "$torch+cpu" 2>/dev/null ||
    install --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null ||
    install "$torch"
install -c constraints.txt "$trl" pytest
printf '%s' "$pins" > $venv/.setup-done
