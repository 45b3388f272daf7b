#!/usr/bin/env bash
# Everything that needs a GPU, on one card, in under 8 minutes, without a network: the compiled
# kernels against float64, then times of every op beside its peers and of whole verify steps.
#
#     tests/benchmarks/gpu.sh            results go to tests/benchmarks/results/<name of the card>/
#     tests/benchmarks/gpu.sh --cpu      every path on a CPU, with tiny shapes; the times mean nothing
#
# Nothing is timed unless the kernels are right. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="kernels:.${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
python="${PYTHON:-python}"

if [[ " $* " != *" --cpu "* ]]; then
    workers=()
    if "$python" -c "import xdist" 2>/dev/null; then workers=(-n 8); fi
    timeout 180 "$python" -m pytest -q -x -p no:cacheprovider "${workers[@]}" -m gpu tests/ops/test_gpu.py tests/scenarios
fi
exec "$python" -m tests.benchmarks.gpu "$@"
