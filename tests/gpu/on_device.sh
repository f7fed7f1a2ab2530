#!/usr/bin/env bash
# All that only a machine with a GPU can show, in one run of less than 10 minutes: no stage goes beyond them.
#
#   tests/gpu/on_device.sh OUT [--wheels DIR] [--small] [--without STAGE]...
#
# Needs python3 with numpy and torch (CUDA), compute-sanitizer, and nvcc or the CUDA headers. blake3, awscrt,
# msgspec, safetensors, pyfastcdc and PyCUDA are installed into a scratch folder if they are not there: from the registry that pip
# knows, or without a network from DIR, which a machine with one fills for that machine's Python:
#
#   pip download --no-deps -d DIR --only-binary :all: --python-version 3.12 \
#       --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 blake3 awscrt msgspec safetensors pyfastcdc
#   pip download --no-deps -d DIR --no-binary pycuda pycuda==2026.1
#
# Stages, each with a limit of its own: vectors rates memcheck racecheck torch verify processor synccheck
# plain_adds.
# Writes OUT/on_device.jsonl (one JSON object a stage) and OUT/on_device.log; prints the first. Ends with 1
# if a stage failed, ran out of time or could not run. --small is for trying the script itself.
set -u
readonly MOST_SECONDS=590 PACKAGES_SECONDS=240

[ $# -ge 1 ] || { sed -n '4p' "$0" >&2; exit 2; }
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift
wheels='' small='' without=' '
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$(cd "$2" && pwd) || exit 2; shift ;;
        --small) small=--small ;;
        --without) without="$without$2 "; shift ;;
        *) echo "on_device.sh: what is $1?" >&2; exit 2 ;;
    esac
    shift
done
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
log=$out/on_device.log
results=$out/on_device.jsonl
: >"$log"
: >"$results"
failed=

say() { printf '%s\n' "$*" | tee -a "$log"; }

# result STAGE: what the stage printed last, on the screen and in the results.
result() { tail -n 1 "$scratch/$1.out" | tee -a "$results"; }

# stage NAME SECONDS COMMAND...: runs it within its limit. Its last line is its result.
stage() {
    local name=$1 limit=$2 status started=$SECONDS
    shift 2
    case $without in *" $name "*) say "-- $name: left out"; return ;; esac
    [ "$limit" -le $((MOST_SECONDS - SECONDS)) ] || limit=$((MOST_SECONDS - SECONDS))
    [ "$limit" -gt 0 ] || { say "-- $name: FAILED, no time is left"; failed="$failed $name"; return; }
    printf -- '-- %s: %s\n' "$name" "$*" >>"$log"
    timeout -k 10 "$limit" "$@" >"$scratch/$name.out" 2>>"$log"
    status=$?
    cat "$scratch/$name.out" >>"$log"
    if [ "$status" -eq 0 ]; then
        say "-- $name: fine ($((SECONDS - started)) s)"
        result "$name"
    else
        say "-- $name: FAILED with $status after $((SECONDS - started)) s; the end of $log:"
        tail -n 15 "$log"
        failed="$failed $name"
    fi
}

python() { python3 -W ignore "$@"; }

importable() { python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

# Packages that are not there, into the scratch folder.
install_packages() {
    local name
    set -- --quiet --no-deps --target "$scratch/site"
    [ -z "$wheels" ] || set -- "$@" --no-index --find-links "$wheels"
    for name in blake3 awscrt msgspec safetensors pyfastcdc; do
        importable "$name" || python -m pip install "$@" "$name" || return
    done
    importable pycuda || python "$root/gpu/build_pycuda.py" "$@" --no-build-isolation pycuda==2026.1
}

# The same kernels with their sums on the usual pipe: says whether moving them was worth it here.
plain_adds() {
    local capability
    cp "$root"/gpu/native/*.cu "$root"/gpu/native/*.cuh "$scratch/plain" || return
    sed -i 's/return left \* gridDim.z + right;/return left + right;/' "$scratch/plain/blake3.cu"
    grep -q 'return left + right;' "$scratch/plain/blake3.cu" || return
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
    nvcc -std=c++17 -fatbin "-gencode=arch=compute_$capability,code=sm_$capability" \
        -o "$scratch/plain/kernels.fatbin" "$scratch/plain/kernels.cu" || return
    python3 "$here/on_device.py" plain_adds "$scratch/plain/kernels.fatbin" $small
}

# sanitized TOOL: every kernel under it, over extents of every kind. An error of the tool is its exit status.
sanitized() {
    compute-sanitizer --tool "$1" --error-exitcode 9 \
        python3 "$here/on_device.py" vectors --small >"$scratch/$1.tool" 2>&1
    local status=$?
    cat "$scratch/$1.tool" >&2
    [ "$status" -eq 0 ] || return "$status"
    printf '{"stage": "%s", "said": "%s"}\n' "$1" "$(grep -h 'SUMMARY' "$scratch/$1.tool" | head -n 1 | tr -d '"=')"
}

# Functions of this script, where `timeout` needs a program.
export here root scratch small wheels
export -f plain_adds sanitized install_packages importable python

mkdir -p "$scratch/site" "$scratch/plain" "$scratch/packages/ckptfs"
for package in gpu store; do ln -s "$root/$package" "$scratch/packages/ckptfs/$package"; done
export PYTHONPATH="$scratch/packages:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1

say "-- $(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader 2>&1 | head -n 1)"
started=$SECONDS
timeout -k 10 "$PACKAGES_SECONDS" bash -c install_packages >>"$log" 2>&1 || { say "on_device.sh: a package could not be installed; the end of $log:"; tail -n 15 "$log"; exit 1; }
say "-- packages: $((SECONDS - started)) s"

stage vectors 60 python3 "$here/on_device.py" vectors $small
stage rates 120 python3 "$here/on_device.py" rates $small
stage memcheck 60 bash -c 'sanitized memcheck'
stage racecheck 60 bash -c 'sanitized racecheck'
stage torch 60 python3 "$here/on_device.py" torch $small
stage verify 50 python3 -W ignore "$here/verify_on_device.py" cuda:0 $small
stage processor 30 python3 "$here/on_device.py" processor $small
stage synccheck 40 bash -c 'sanitized synccheck'
stage plain_adds 60 bash -c plain_adds

if [ -n "$failed" ]; then
    say "-- failed:$failed"
    exit 1
fi
say "-- all fine after $SECONDS s; the figures are in $results"
