#!/bin/sh
# Makes .venv-nixl: .venv and NIXL on top of it, for `make test-nixl`. NIXL stays apart because it is optional, large,
# partly under a proprietary licence, and built for Linux alone; it needs no GPU and no CUDA to run on host memory.
set -eu
cd "$(dirname "$0")/.."

pin=$(grep '^nixl-cu12==' constraints.txt)
venv=.venv-nixl
stamp="$(pwd -P) $pin"
if [ "$(cat $venv/.setup-done 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
printf '==> installing %s into %s\n' "$pin" "$venv"
rm -rf $venv
.venv/bin/python -m venv $venv
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
here=$(site $venv/bin/python)
# addsitedir, because the packages of .venv are editable: their own .pth files have to be read too.
printf 'import site; site.addsitedir("%s")\n' "$(site .venv/bin/python)" > "$here/venv_below.pth"
# pip, because whoever pointed it at a mirror, a folder of wheels or a certificate meant it for this.
$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$pin"
printf '%s' "$stamp" > $venv/.setup-done
