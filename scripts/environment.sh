# Sourced by serve, test and release: makes .venv next to this folder and installs into it.
#
#   prepare NAME EXTRAS PACKAGE…   installs the project with EXTRAS ("" or "[a,b]"), then each PACKAGE
#                                  with --no-deps, unless exactly that has been done before.
#   make_environment FOLDER        makes a virtual environment there, unless there is one.
#   pip_install FOLDER ARGUMENT…   runs pip install in that environment, with the versions of $constraints.
#   prepare_apart NAME ARGUMENT…   runs pip install in .venv-NAME, with the versions of constraints-NAME.txt: for what
#                                  needs other versions than the project does, or is none of its dependencies.
#   install_debian PACKAGE…        installs Debian's packages that are missing, as root; else says which tests are skipped.
#
# PYTHON              interpreter to make .venv with (default: python3)
# POOL_CONSTRAINTS    versions to install (default: constraints.txt); a GPU machine brings its own
# Other package sources are pip's own business: PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, pip.conf.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
constraints=${POOL_CONSTRAINTS:-$root/constraints.txt}

make_environment() {
    if [ ! -x "$1/bin/python" ]; then
        echo "making $1" >&2
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON")'
        "${PYTHON:-python3}" -m venv "$1"
    fi
}

pip_install() {
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check)
    shift
    [ -t 2 ] || pip+=(--quiet)  # a terminal gets pip's progress bars
    PIP_CONSTRAINT=$constraints "${pip[@]}" "$@" >&2  # as a variable, it holds for the build backend too
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
    echo "installing trio_pool_serve$extras; the first time this takes a minute or two" >&2
    # torch first and by itself: its version decides which of several builds is taken.
    pip_install "$venv" torch
    pip_install "$venv" --editable "$root$extras"
    local package
    for package in "$@"; do
        pip_install "$venv" --no-deps "$package"
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
    PIP_CONSTRAINT=$root/constraints-$name.txt \
        "$apart/bin/python" -m pip install --disable-pip-version-check --quiet "$@" >&2
    printf '%s' "$wanted" > "$stamp"
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
