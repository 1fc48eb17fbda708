# shellcheck shell=bash
# Sourced by scripts/tiering and scripts/test after `repo` is set: `ensure_venv LOCK` makes $repo/.venv hold exactly
# what LOCK lists and sets `python`. An unchanged lock costs one cmp. Copies of the installed locks are the stamps.
# A marker left by an interrupted install makes the next run start over; a file lock lets the second of two starters wait.

venv="$repo/.venv"
marker="$repo/.venv.installing"

find_python() {
    local name
    for name in "${TIERING_PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$name" ] || continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: Python 3.11 or later is needed and was not found on PATH; install it or set TIERING_PYTHON=/path/to/python3" >&2
    return 6
}

venv_is_current() {
    python="$venv/bin/python"
    [ -x "$python" ] && [ ! -e "$marker" ] && cmp -s "$1" "$venv/.${1##*/}"
}

link_package() { # makes `import ollama_tiering` work; also after the repository was moved
    local site link
    for site in "$venv"/lib/python3*/site-packages; do
        link="$site/ollama_tiering.pth"
        [ -r "$link" ] && [ "$(<"$link")" = "$repo" ] || printf '%s\n' "$repo" >"$link"
    done
}

install_venv() { # holds the file lock
    local lock=$1 base
    venv_is_current "$lock" && return
    if [ -e "$marker" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        base=$(find_python) || exit $?
        : >"$marker"
        echo "tiering: making $venv with $base" >&2
        if ! "$base" -m venv --clear "$venv" >&2; then
            echo "error: $base cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2
            exit 6
        fi
    fi
    : >"$marker"
    echo "tiering: installing the packages of ${lock##*/}, once" >&2
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --require-hashes --progress-bar on \
        -r "$lock" >&2; then
        echo "error: installing the packages of $lock failed, see above; the next run starts over" >&2
        exit 6
    fi
    # the developers' lock holds the other one too
    [ "${lock##*/}" = requirements-dev.lock ] && cp "$repo/requirements.lock" "$venv/.requirements.lock"
    cp "$lock" "$venv/.${lock##*/}"
    rm -f "$marker"
}

ensure_venv() {
    local base
    if ! venv_is_current "$repo/$1"; then
        base=$(find_python) || exit $?
        "$base" -c '
import fcntl, os, sys
held = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
fcntl.flock(held, fcntl.LOCK_EX)
os.set_inheritable(held, True)
os.execvp(sys.argv[2], sys.argv[2:])
' "$repo/.venv.lock" bash -c 'repo=$1; . "$repo/scripts/venv.sh"; install_venv "$repo/$2"' bash "$repo" "$1" || exit $?
    fi
    link_package
    python="$venv/bin/python"
}
