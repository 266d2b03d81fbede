#!/bin/sh
# Writes constraints.txt: the newest versions that the packages' ranges, extras and the dev group allow together.
# Run the tests afterwards: the file promises that its versions were tried together.
set -eu
cd "$(dirname "$0")/.."

requirements=.lock-requirements.in
trap 'rm -f $requirements' EXIT
{
    for package in libs/* services/*; do printf -- '-e ./%s\n' "$package"; done
    printf '%s\n' '-e ./libs/transfer[nixl]' '-e ./services/trainer[deepspeed]' hatchling uv
} > $requirements
pinned=$(.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --no-annotate --no-header \
    --group dev $requirements)
{
    sed -n '/^#/p' constraints.txt
    printf '%s\n' "$pinned" | grep -vE '^(-e|cuda-|nvidia-|triton|colorama|httpx2-jsfetch)' | sed 's/ ;.*//'
} > $requirements.out
mv $requirements.out constraints.txt
