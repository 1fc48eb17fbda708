# shellcheck shell=bash
# Sourced by scripts/tiering, scripts/extra and scripts/test after `repo` is set: `ensure_venv LOCK` makes $repo/.venv
# hold what LOCK and the locks it adds to list, and sets `python`. An unchanged lock costs one cmp. Copies of the installed
# locks are the stamps.
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

locks_of() { # sets `locks`: those that a lock adds to, and itself
    locks=("$repo/requirements.lock")
    case $1 in
    requirements.lock) ;;
    requirements-dev.lock) locks=("$repo"/requirements*.lock) ;;
    *) locks+=("$repo/$1") ;;
    esac
}

venv_is_current() {
    local lock locks
    python="$venv/bin/python"
    [ -x "$python" ] && [ ! -e "$marker" ] || return
    locks_of "$1"
    for lock in "${locks[@]}"; do
        cmp -s "$lock" "$venv/.${lock##*/}" || return
    done
}

link_package() { # makes `import ollama_tiering` work; also after the repository was moved
    local site link
    for site in "$venv"/lib/python3*/site-packages; do
        link="$site/ollama_tiering.pth"
        [ -r "$link" ] && [ "$(<"$link")" = "$repo" ] || printf '%s\n' "$repo" 2>/dev/null >"$link" || not_ours "$link"
    done
}

install_venv() { # holds the file lock
    local name=$1 lock locks base started=$SECONDS
    venv_is_current "$name" && return
    locks_of "$name"
    printf 'tiering: installing the packages of %s into %s, once: %s ... ' "$name" "$venv" "$(needs "$name")" >&2
    if [ -e "$marker" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        base=$(find_python) || exit $?
        : >"$marker"
        "$base" -m venv --clear --without-pip "$venv" >&2 || no_venv "$base"
    fi
    : >"$marker"
    link_package
    # pip is as big as a tenth of all the rest: it comes for the install and leaves with it
    "$venv/bin/python" -m ensurepip >/dev/null || no_venv "$venv/bin/python"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --no-compile \
        --require-hashes "${locks[@]/#/--requirement=}" >&2; then
        echo "error: installing the packages of $repo/$name failed, see above; the next run starts over" >&2
        exit 6
    fi
    if [ "$name" != requirements-dev.lock ] && [ ! -e "$venv/.requirements-dev.lock" ]; then
        "$venv/bin/python" -m pip uninstall --quiet --yes pip setuptools 2>/dev/null
        lighten
    fi
    for lock in "${locks[@]}"; do
        cp "$lock" "$venv/.${lock##*/}"
    done
    rm -f "$marker"
    printf 'done in %d s\n' $((SECONDS - started)) >&2
}

needs() { # what `du -sm .venv` and the clock say; measure/first_run.py measures both
    case $1 in
    requirements.lock) echo "network, up to 100 MB of disk, mostly less than a minute" ;;
    *) echo "network, a minute or more" ;;
    esac
}

no_venv() {
    printf '\nerror: %s cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv\n' "$1" >&2
    exit 6
}

not_ours() { # the checkout was set up by another user, or cannot be at all: $1 cannot be written
    local why="$venv is not made yet"
    [ ! -e "$venv" ] || why="$venv is of another version, or was moved"
    [ ! -L "$venv/bin/python" ] || [ -x "$venv/bin/python" ] || why="this user cannot run $(readlink -m "$venv/bin/python")"
    echo "error: this user cannot write $1, and $why" >&2
    echo "hint: run $repo/scripts/tiering --version once as $(stat -c %U "$repo") with a Python that all may run, or make a checkout of your own" >&2
    exit 6
}

lighten() { # drops what no command loads: packages' own tests, the spare half of zstandard, its symbols for debuggers
    local site library
    for site in "$venv"/lib/python3*/site-packages; do
        find "$site" -type d -name tests -prune -exec rm -rf {} +
        rm -f "$site"/zstandard/_cffi.*
        for library in "$site"/zstandard/backend_c.*.so; do
            # never in place: a command that has it loaded while an extra is installed would crash
            if strip --strip-unneeded -o "$library.light" "$library" 2>/dev/null; then
                mv -f "$library.light" "$library"
            fi
        done
    done
}

ensure_venv() {
    local base place
    if ! venv_is_current "$1"; then
        for place in "$repo" "$repo/.venv.lock" "$venv"; do
            [ ! -e "$place" ] || [ -w "$place" ] || not_ours "$place"
        done
        base=$(find_python) || exit $?
        "$base" -c '
import fcntl, os, sys
try:
    held = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
except OSError as error:
    sys.exit(f"error: {sys.argv[1]}: {error.strerror}\nhint: free some space there, or make a checkout elsewhere")
if os.fstat(held).st_uid == os.geteuid():
    os.fchmod(held, 0o600)  # whoever may open it could hold it
fcntl.flock(held, fcntl.LOCK_EX)
os.set_inheritable(held, True)
os.execvp(sys.argv[2], sys.argv[2:])
' "$repo/.venv.lock" bash -c 'repo=$1; . "$repo/scripts/venv.sh"; install_venv "$2"' bash "$repo" "$1" || exit $?
    fi
    link_package
    python="$venv/bin/python"
}
