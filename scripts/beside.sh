# shellcheck shell=bash
# Sourced by scripts/test and scripts/engines, which set `venv` before: `beside MARKERS [PATH...]` runs tests on two cores.
# Where two tests share a machine, one may fail by being late. A file that fails has to pass alone, and it is said.

# A run has a folder of its own for temporary files. In the one that pytest shares between runs it removes what older ones left there,
# and fails if it cannot: because of a mount, or because somebody still writes there. What a failed run leaves is kept.
in_own_folder() {
    local folder rc
    folder=$(mktemp -d) || return
    "$venv/bin/python" -m pytest -q -p no:cacheprovider --basetemp "$folder/t" "$@"
    rc=$?
    if [ "$rc" -eq 1 ]; then
        echo "the files of these tests are in $folder/t"
    else
        rm -rf "$folder"
    fi
    return "$rc"
}

beside() {
    local markers=$1 rc files output
    shift
    output=$(mktemp)
    in_own_folder -n 2 --dist loadfile --no-loadscope-reorder -m "$markers" "$@" 2>&1 | tee "$output"
    rc=${PIPESTATUS[0]}
    mapfile -t files < <(sed -n 's/^\(FAILED\|ERROR\) \([^:]*\)::.*/\2/p' "$output" | sort -u)
    rm -f "$output"
    [ "$rc" -eq 1 ] && [ ${#files[@]} -ge 1 ] && [ ${#files[@]} -le 5 ] || return "$rc"
    echo "once more, alone: ${files[*]}"
    in_own_folder -m "$markers" "${files[@]}" || return
    printf 'SKIP failed beside other tests, passed alone: %s\n' "${files[@]}"
}
