#!/usr/bin/env bash
# What only a GPU shows, in ten minutes: the tests marked gpu, the kernels of a step, the benchmark.
#   bash scripts/on_a_gpu.sh [WHEELS]
# WHEELS: a folder of wheels to install, on a machine without a network. The page with the machine's
# name is runs/on_a_gpu/page.md. Without a GPU it rehearses on the CPU what can be shown there.
set -uo pipefail
cd "$(dirname "$0")/.."
out=runs/on_a_gpu
rm -rf "$out"
mkdir -p "$out"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" REHEARSE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -gt 0 ]; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --target "$site" "$1"/*.whl || exit
    PYTHONPATH="$site:$PYTHONPATH"
fi
device=$(python3 -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
began=$SECONDS failed=()
part() { # NAME SECONDS COMMAND...: run it so long at most, and note whether it failed
    local name=$1 seconds=$2 since=$SECONDS
    shift 2
    timeout "$seconds" "$@" > "$out/$name.log" 2>&1 || failed+=("$name")
    echo "$name: $((SECONDS - since)) s, $(tail -n 1 "$out/$name.log")"
}
part tests 240 python3 -m pytest -q -p no:cacheprovider -m gpu tests/core tests/lowbit tests/data tests/bench
part training 60 python3 scripts/train.py experiment=digits_mlp dtype=mixed loss_scaling=Backoff \
    "device=$device" trainer.epochs=3 callbacks.progress_bar=null "hydra.run.dir=$out/run"
part resumed 60 python3 scripts/train.py experiment=digits_mlp dtype=mixed loss_scaling=Backoff \
    "device=$device" trainer.epochs=4 callbacks.progress_bar=null "resume=$out/run" "hydra.run.dir=$out/run"
part bench 200 python3 scripts/bench.py cuda "out=$out"
{
    echo "# On $device"
    echo
    python3 -c 'import torch; cuda = torch.cuda.is_available()
print(torch.cuda.get_device_name() if cuda else "no GPU: a rehearsal", ", torch ", torch.__version__, sep="")'
    echo
    echo "\`bash scripts/on_a_gpu.sh\`, $((SECONDS - began)) s; failed: ${failed[*]:-nothing}"
    for name in tests training resumed; do
        printf '\n## %s\n\n```\n%s\n```\n' "$name" "$(tail -n 12 "$out/$name.log")"
    done
    echo
    cat "$out/cuda.md"
} > "$out/page.md"
cat "$out/page.md"
[ ${#failed[@]} -eq 0 ]
