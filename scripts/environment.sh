# Sourced by serve, test and release: makes .venv next to this folder and installs into it.
#
#   prepare NAME EXTRAS PACKAGE…   installs the project with EXTRAS ("" or "[a,b]"), then each PACKAGE
#                                  with --no-deps, unless exactly that has been done before.
#   make_environment FOLDER        makes a virtual environment there, unless there is one.
#   install_into FOLDER ARGUMENT…  installs in that environment, with the versions of $constraints.
#   prepare_apart NAME ARGUMENT…   installs in .venv-NAME, with the versions of constraints-NAME.txt: for what
#                                  needs other versions than the project does, or is none of its dependencies.
#   prepare_node FOLDER            installs what FOLDER/package-lock.json lists; if that fails, says which tests are skipped.
#   install_debian PACKAGE…        installs Debian's packages that are missing, as root; else says which tests are skipped.
#
# uv installs, from the package sources that pip is configured with (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS,
# pip.conf), and torch from PyTorch's own index if that can be reached: its build for the CPU, or for the GPU's driver.
# Without uv, and if it fails, pip installs as it is configured.
#
# PYTHON              interpreter to make .venv with (default: python3)
# POOL_CONSTRAINTS    versions to install (default: constraints.txt); with it, pip's sources decide which build of torch
# UV_TORCH_BACKEND    build of torch to install (default: auto)
# POOL_INSTALLER      pip: do without uv

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
constraints=${POOL_CONSTRAINTS:-$root/constraints.txt}

make_environment() {
    if ! "$1/bin/python" -c 'import pip' 2> /dev/null; then  # none, or one whose making was interrupted
        echo "making $1" >&2
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON")'
        "${PYTHON:-python3}" -m venv --clear "$1"
    fi
}

pip_install() {
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check)
    shift
    [ -t 2 ] || pip+=(--quiet)  # a terminal gets pip's progress bars
    PIP_CONSTRAINT=$constraints "${pip[@]}" "$@" >&2  # as a variable, it holds for the build backend too
}

# Sets $uv_environment, once: what uv is told of pip's sources, and which build of torch to take; empty if uv is not used.
find_uv() {
    [ -z "${uv_environment+x}" ] || return 0
    uv_environment=()
    [ "${POOL_INSTALLER:-}" != pip ] || return 0
    local version sources
    version=$(sed -n 's/^uv==//p' "$root/constraints.txt")
    if ! "$venv/bin/uv" --version 2> /dev/null | grep --quiet --fixed-strings "uv $version"; then
        pip_install "$venv" --no-deps "uv==$version" || { echo "installing with pip" >&2; return 0; }
    fi
    sources=$(mktemp)  # NUL ends a value, which no variable of the shell can have; only this user can read it
    if "$venv/bin/python" "$root/scripts/package_sources.py" > "$sources"; then
        mapfile -d '' -t uv_environment < "$sources"
        # The versions are exact, whatever else is in a configuration; no Python is downloaded.
        uv_environment+=("UV_PYTHON_DOWNLOADS=never")
        if [ -z "${UV_TORCH_BACKEND:-}" ] && [ -z "${POOL_CONSTRAINTS:-}" ] \
            && (export "${uv_environment[@]}"; timeout 3 "$venv/bin/python" "$root/scripts/package_sources.py" --torch); then
            uv_environment+=("UV_TORCH_BACKEND=auto")
        fi
    else
        echo "installing with pip" >&2
    fi
    rm "$sources"
}

install_into() {
    find_uv
    if [ ${#uv_environment[@]} -gt 0 ]; then
        local folder=$1
        shift
        if (
            export "${uv_environment[@]}" UV_CONSTRAINT="$constraints" UV_BUILD_CONSTRAINT="$constraints"
            "$venv/bin/uv" pip install --python "$folder/bin/python" "$@" >&2
        ); then
            return 0
        fi
        echo "uv has failed: installing with pip" >&2
        set -- "$folder" "$@"
    fi
    pip_install "$@"
}

prepare() {
    local name=$1 extras=$2
    shift 2
    local stamp=$venv/.installed-$name
    local wanted
    wanted=$(cat "$constraints" "$root/pyproject.toml" | sha256sum; echo "$root $extras $*")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    make_environment "$venv"
    echo "installing trio_pool_serve$extras; the first time this takes a minute or less where packages are near" >&2
    # torch first and by itself: its version decides which of several builds is taken.
    install_into "$venv" torch
    install_into "$venv" --editable "$root$extras"
    local package
    for package in "$@"; do
        install_into "$venv" --no-deps "$package"
    done
    printf '%s' "$wanted" > "$stamp"
}

prepare_apart() {
    local name=$1
    shift
    local apart=$root/.venv-$name
    local stamp=$apart/.installed
    local wanted
    wanted=$(sha256sum < "$root/constraints-$name.txt"; echo "$root $*")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    make_environment "$apart"
    echo "installing $*" >&2
    constraints=$root/constraints-$name.txt install_into "$apart" "$@"
    printf '%s' "$wanted" > "$stamp"
}

prepare_node() {
    local stamp=$1/node_modules/.installed
    local wanted
    wanted=$(sha256sum < "$1/package-lock.json")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "installing the clients for JavaScript" >&2
    if command -v npm > /dev/null && timeout 300 npm --prefix "$1" ci --silent --ignore-scripts --no-audit --no-fund >&2; then
        printf '%s' "$wanted" > "$stamp"
    else
        rm -rf "$1/node_modules"
        echo "not installed, so that tests are skipped: npm, or what it should fetch" >&2
    fi
}

install_debian() {
    local missing=() package
    for package in "$@"; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null | grep --quiet '^installed$' \
            || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || [ -z "$(command -v apt-get)" ]; then
        echo "not installed, so that tests are skipped: apt-get install ${missing[*]}" >&2
        return 0
    fi
    echo "installing ${missing[*]}" >&2
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}" > /dev/null
}
