#!/bin/sh
# Makes .venv-deepspeed for `make test-deepspeed`: everything of .venv, and DeepSpeed. It stays apart because DeepSpeed is
# optional and is built from source against the torch it finds.
set -eu
cd "$(dirname "$0")/.."

pin=deepspeed==0.19.8
venv=.venv-deepspeed
below=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "$(cat $venv/.setup-done 2>/dev/null)" = "$pin $below" ]; then
    exit 0
fi
printf '==> installing %s into %s, over .venv\n' "$pin" "$venv"
rm -rf $venv
.venv/bin/python -m venv $venv
own=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# addsitedir, because the services are installed in place: their paths stand in .pth files of .venv.
printf 'import site; site.addsitedir(%s)\n' "'$below'" > "$own/below.pth"
$venv/bin/python -m pip install --quiet --disable-pip-version-check 'setuptools>=70' wheel
# Nothing is compiled beforehand, and nothing later either: the trainer steps with torch's own AdamW.
DS_BUILD_OPS=0 $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation "$pin"
printf '%s' "$pin $below" > $venv/.setup-done
