# shellcheck shell=bash
# Sourced by scripts/test and scripts/engines, which set `venv` before: `beside MARKERS [PATH...]` runs tests on two cores.
# Where two tests share a machine, one may fail by being late. A file that fails has to pass alone, and it is said.

beside() {
    local markers=$1 rc files output python=$venv/bin/python
    shift
    output=$(mktemp)
    "$python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --no-loadscope-reorder -m "$markers" "$@" 2>&1 | tee "$output"
    rc=${PIPESTATUS[0]}
    mapfile -t files < <(sed -n 's/^\(FAILED\|ERROR\) \([^:]*\)::.*/\2/p' "$output" | sort -u)
    rm -f "$output"
    [ "$rc" -eq 1 ] && [ ${#files[@]} -ge 1 ] && [ ${#files[@]} -le 5 ] || return "$rc"
    echo "once more, alone: ${files[*]}"
    "$python" -m pytest -q -p no:cacheprovider -m "$markers" "${files[@]}" || return
    printf 'SKIP failed beside other tests, passed alone: %s\n' "${files[@]}"
}
