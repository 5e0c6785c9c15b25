#!/bin/bash
# Both examples on one GPU with nccl: what the library chose (backend, device, device_ids, dtype) and tokens per second.
# Needs torch with CUDA and scikit-learn, no network. From the root of the repository: bash bench/gpu_examples.sh
set -eu
export PYTHONPATH=trainer:${PYTHONPATH:-} OMP_NUM_THREADS=4
probe=$(mktemp --suffix=.py)
trap 'rm -f "$probe"' EXIT
cat > "$probe" <<'PY'
import runpy, sys, torch
from ddpjob import World
wrap = World.wrap
def telling(self, model, **kw):
    ddp = wrap(self, model, **kw)
    print(f"{torch.cuda.get_device_name()}: {self.backend} {self.device} device_ids {ddp.device_ids}", flush=True)
    def once(module, args, output):
        print(f"autocast {torch.is_autocast_enabled('cuda')} output {output.dtype} on {output.device}", flush=True)
        hook.remove()
    hook = ddp.register_forward_hook(once)
    return ddp
World.wrap = telling
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
PY
run() { echo "== $*"; torchrun --standalone --nproc-per-node 1 "$probe" "$@"; }
large="--layers 6 --width 384 --heads 6 --context 256 --global-batch 64 --epochs 12 --lr 1e-3"
run trainer/examples/digits.py
run trainer/examples/byte_lm.py
run trainer/examples/byte_lm.py $large
run trainer/examples/byte_lm.py $large --no-bf16
