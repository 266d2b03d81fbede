#!/bin/sh
# usage: shim.sh RUN_DIR MAX_FILE_BLOCKS COMMAND [ARGUMENT...]
#
# Runs COMMAND and writes how it ended to RUN_DIR/exit, atomically. Lives in a session of its own, so that it outlives
# the executor; a later executor finds RUN_DIR/pid and RUN_DIR/exit. Standard input is a file that the executor locked:
# it stays locked exactly as long as this shim lives, so the harness must not inherit it.
run=$1
ulimit -f "$2"
shift 2
printf '%s\n' "$$" >"$run/pid.aside" && mv "$run/pid.aside" "$run/pid"
# A handler and not an ignored signal: ignored signals would be inherited by the harness.
trap : HUP INT TERM
"$@" </dev/null &
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
printf '%s\n' "$code" >"$run/exit.aside" && mv "$run/exit.aside" "$run/exit"
