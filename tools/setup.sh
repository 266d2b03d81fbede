#!/bin/sh
# Makes .venv: everything that `make demo` and `make test` need, from nothing but Python 3.11+.
#
#   tools/setup.sh              create or complete .venv; does nothing when it is current
#   GYRE_TORCH=cpu              the CPU build of torch (default; once chosen, a build is kept)
#   GYRE_TORCH=cuda             the build PyPI serves (CUDA on Linux x86-64)
#   GYRE_TORCH=NAME             any backend uv knows: cu128, rocm6.4, xpu, auto ...
#   PYTHON=/path/to/python      instead of the first Python 3.11+ found
#
# .venv/.setup-done is a copy of all that decided the install. It is removed before anything changes and written last,
# so an interrupted install is never taken for a finished one, and a second call only compares two small files.
set -eu
cd "$(dirname "$0")/.."
. tools/uv_settings.sh

venv=.venv
done_stamp=$venv/.setup-done
building=$venv/.setup-building
torch_before=$(sed -n 's/^torch //p' $done_stamp $building 2>/dev/null | head -n 1)
torch_build=${GYRE_TORCH:-${torch_before:-cpu}}
min_minor=11

say() { printf '==> %s\n' "$*"; }
warn() { printf '==> warning: %s\n' "$*" >&2; }
die() { printf '==> error: %s\n' "$*" >&2; exit 1; }

inputs() {
    printf 'checkout %s\ntorch %s\n' "$(pwd -P)" "$torch_build"
    cat tools/setup.sh tools/uv_settings.sh constraints.txt pyproject.toml libs/*/pyproject.toml services/*/pyproject.toml
}

find_python() {
    found=
    for candidate in ${PYTHON:-python3 python python3.14 python3.13 python3.12 python3.11}; do
        version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
        found="$found $candidate=$version"
        minor=${version#*.}
        if [ "${version%%.*}" -eq 3 ] && [ "${minor%%.*}" -ge $min_minor ]; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "OpenGyre needs Python 3.$min_minor or newer; found:${found:- none}." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.12"
}

# Debian's python3 comes without ensurepip unless python3-venv is installed; its own pip can fill a bare environment.
create_venv() {
    python=$(find_python)
    say "creating $venv with $python ($("$python" --version 2>&1))"
    rm -rf $venv
    if ! "$python" -m venv $venv >/dev/null 2>&1; then
        "$python" -m venv --clear --without-pip $venv ||
            die "$python cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)"
    fi
    printf 'torch %s\n' "$torch_build" > $building
    say "installing uv into $venv"
    if $venv/bin/python -m pip --version >/dev/null 2>&1; then
        $venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
    else
        "$python" -m pip --python $venv/bin/python install --quiet -c constraints.txt uv ||
            die "$python has neither ensurepip nor pip (Debian: apt install python3-venv)"
    fi
}

pip_settings() {
    $venv/bin/python -m pip config list 2>/dev/null || "$(find_python)" -m pip config list 2>/dev/null || true
}

uv_install() { $venv/bin/uv pip install --quiet --python $venv/bin/python "$@"; }

install_torch() {
    pin=$(grep '^torch==' constraints.txt)
    case $torch_build in
        cpu) install_cpu_torch ;;
        cuda) say "installing $pin (the build PyPI serves)"; uv_install -c constraints.txt "$pin" ;;
        *) say "installing $pin (backend $torch_build)"; uv_install -c constraints.txt --torch-backend="$torch_build" "$pin" ;;
    esac
}

# PyPI's Linux build of torch brings gigabytes of CUDA libraries. The CPU build is a local version, found in a folder
# of wheels or on PyTorch's own index; only when neither answers is the big one taken. macOS has one build.
install_cpu_torch() {
    say "installing $pin (CPU build)"
    if [ "$(uname -s)" != Linux ]; then
        uv_install -c constraints.txt "$pin"
    elif uv_install "$pin+cpu" 2>/dev/null; then
        say "took the CPU wheel from ${UV_FIND_LINKS:-the index}"
    elif UV_HTTP_RETRIES=0 uv_install --torch-backend=cpu "$pin" 2>/dev/null; then
        say "took the CPU wheel from PyTorch's index"
    else
        warn "no CPU build of torch within reach; taking PyPI's, which may bring CUDA libraries of several GB"
        uv_install -c constraints.txt "$pin"
    fi
}

install_packages() {
    say "installing the services, the libraries and what the tests need"
    set -- --group dev
    for package in libs/* services/*; do
        set -- "$@" -e "$package"
    done
    UV_COMPILE_BYTECODE=1 uv_install -c constraints.txt -b constraints.txt "$@"
    # Where PYTHONDONTWRITEBYTECODE is set, every process would compile our sources anew.
    $venv/bin/python -m compileall -q libs services
}

if [ -f $done_stamp ] && inputs | cmp -s - $done_stamp && $venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi
if [ -f $done_stamp ] && [ "$torch_build" = "$torch_before" ] && $venv/bin/uv --version >/dev/null 2>&1; then
    say "$venv is out of date: bringing it up to date"
    mv $done_stamp $building
else
    [ ! -e $building ] || say "the last set-up did not finish: starting anew"
    create_venv
fi
export_uv_settings "$(pip_settings)" "$venv"
install_torch
install_packages
inputs > $done_stamp
rm -f $building
say "done: $venv is ready"
