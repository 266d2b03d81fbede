# To be sourced. uv reads none of pip's settings; whoever pointed pip at a mirror, a folder of wheels or a certificate meant
# it for uv too. What the environment already says to uv stands.

setting() { printf '%s\n' "$1" | sed -n "s/^[a-z:]*\\.$2='\\(.*\\)'\$/\\1/p" | tail -n 1; }

# export_uv_settings WHAT_PIP_CONFIG_LIST_SAYS VENV
export_uv_settings() {
    : "${UV_FIND_LINKS:=$(setting "$1" find-links)}" "${UV_DEFAULT_INDEX:=$(setting "$1" index-url)}"
    : "${SSL_CERT_FILE:=$(setting "$1" cert)}"
    [ -z "$UV_FIND_LINKS" ] || export UV_FIND_LINKS
    [ -z "$UV_DEFAULT_INDEX" ] || export UV_DEFAULT_INDEX
    [ -z "$SSL_CERT_FILE" ] || export SSL_CERT_FILE
    export UV_PYTHON_DOWNLOADS=never VIRTUAL_ENV="$(pwd -P)/$2"
}
