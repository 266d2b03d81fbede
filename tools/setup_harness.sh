#!/bin/sh
# Makes .venv-harness with the third-party agents that `make test-harness` drives. They stay apart because their
# dependencies are their own affair: the services never import them, they only start them as processes. Those that come
# from npm are left out where there is no npm; their licences are their makers'.
set -eu
cd "$(dirname "$0")/.."

pin=mini-swe-agent==2.4.6
agents='@anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0'
venv=.venv-harness
command -v npm > /dev/null || agents=''
if [ "$(cat $venv/.setup-done 2>/dev/null)" = "$pin $agents" ]; then
    exit 0
fi
printf '==> installing %s into %s\n' "$pin $agents" "$venv"
rm -rf $venv
.venv/bin/python -m venv $venv
$venv/bin/python -m pip install --quiet --disable-pip-version-check "$pin"
if [ -n "$agents" ]; then
    # shellcheck disable=SC2086
    npm install --prefix $venv/node --no-audit --no-fund --loglevel=error $agents
    for name in claude codex; do ln -s "../node/node_modules/.bin/$name" "$venv/bin/$name"; done
fi
printf '%s' "$pin $agents" > $venv/.setup-done
