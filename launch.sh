#!/usr/bin/env bash
# bash launch.sh grpo.py [args]              train: one rank per GPU, or a single rank on the CPU
# bash launch.sh --nproc 2 grpo.py [args]    another number of ranks on this machine (or NPROC=2)
# bash launch.sh --no-vllm grpo.py [args]    without installing vLLM: Transformers samples
# bash launch.sh --gpu python -c ""          install for a GPU where none is seen: image, login node
# bash launch.sh pytest [args]               the tests, in the same environment
# bash launch.sh python x.py [args]          any Python, in the same environment
# NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 [MASTER_PORT=29500] bash launch.sh grpo.py    on each of 2
#
# Four chores stand between a clone and the first step; each goes wrong when it is done by hand.
# 1. The environment. A cut install looks finished; two launches at once write over each other. So:
#    the active environment if it has what pyproject.toml asks for, else .venv, filled under a lock.
#    A checksum of pyproject.toml is written last; a later start compares that alone, in 0.3 s.
# 2. Where the GPUs sit. A rank on the wrong socket reaches its GPU over the link between sockets:
#    the topology in a sentence, and ranks bound by numactl, for 1-10 % (torch/numa/binding.py).
# 3. NCCL finds the transport itself. One variable is set, and never over a value of yours.
# 4. torchrun. With a fixed port the second job on a host dies, and a failed rank's message is lost
#    above torchrun's traceback. So: a free port, and its last words last. No elastic restarts.
# SPDX-FileCopyrightText: 2026 handful contributors (launch.sh of handful 0.1.0)
# SPDX-License-Identifier: MIT-0
set -euo pipefail  # and nothing newer than the bash 3.2 of macOS

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
log=$venv/install.log
python=$venv/bin/python
tool=$root/tools/launch.py
cpu_index=https://download.pytorch.org/whl/cpu  # asked for torch alone, if pip has no settings
say() { echo "launch: $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }
default() { [[ ${!1+set} ]] || export "$1=$2"; }  # your value stays, an empty one too
usage() { sed -n '2,/^#$/s/^# \{0,1\}//p' "$root/launch.sh"; }

# What is asked for. A mistake is answered here, before minutes of installing.
num_ranks=${NPROC:-}
no_vllm=
kind=cpu
while [[ ${1:-} == -* ]]; do
  case $1 in
    -h | --help) usage; exit ;;
    --nproc) num_ranks=${2:-none}; shift $(($# > 1 ? 1 : 0)) ;;
    --nproc=*) num_ranks=${1#*=} ;;
    --no-vllm) no_vllm=--no-vllm ;;
    --gpu) kind=gpu ;;
    *) die "launch.sh has no option $1; it has --nproc N, --no-vllm, --gpu and --help" ;;
  esac
  shift
done
[[ $# -gt 0 ]] || { usage >&2; exit 2; }
script=$([[ -e $1 ]] || echo "$root/")$1
if [[ $1 != python && $1 != pytest && ! -f $script ]]; then
  scripts=$(cd "$root" && grep -l '^if __name__' ./*.py | cut -c3- | tr '\n' ' ') || scripts=
  die "there is no $1 here or in $root; there are: ${scripts}pytest python (and --help)"
fi
[[ $script != *.sh ]] || die "$1 is run by itself: bash $1"

gpus=$(nvidia-smi --query-gpu=index,uuid,name --format=csv,noheader 2>/dev/null) || gpus=
visible=$(cut -d, -f1 <<<"$gpus" | paste -sd, -)
if [[ $gpus ]]; then visible=${CUDA_VISIBLE_DEVICES-$visible}; fi
visible=${visible/#-1*/}  # CUDA shows no GPU for -1
num_gpus=$(tr , '\n' <<<"$visible" | grep -c . || true)
num_ranks=${num_ranks:-$((num_gpus > 0 ? num_gpus : 1))}
[[ $num_ranks =~ ^[1-9][0-9]*$ ]] || die "--nproc $num_ranks is no number of ranks; give 1 or more"
((num_gpus == 0 || num_ranks <= num_gpus)) ||
  die "--nproc $num_ranks, but $num_gpus visible GPUs; give at most that"
if ((${NNODES:-1} > 1)) && [[ ! ${MASTER_ADDR:-} || ! ${NODE_RANK:-} ]]; then
  die "NNODES=$NNODES needs NODE_RANK (from 0) and MASTER_ADDR (of node 0)"
fi

# The environment. The engine is first: it brings the torch that it was built for.
if [[ $gpus || -e $venv/installed-gpu ]]; then kind=gpu; fi  # login and GPU nodes share a .venv
groups=("$kind" base)
case $kind-$(uname -sm) in
  gpu-* | cpu-"Linux x86_64" | cpu-"Linux aarch64") ;;
  *) no_vllm=${no_vllm:-"it has no build for $(uname -sm)"} ;;
esac
if [[ $kind == cpu && $root == *" "* ]]; then no_vllm=${no_vllm:-"$root has a space"}; fi  # its g++
if [[ $no_vllm ]]; then
  groups=(base)
  say "vLLM is not installed ($no_vllm); where it is missing, Transformers samples"
fi
if [[ $1 == pytest ]]; then groups+=(wandb data gguf test); fi  # the tests cover every extra
if [[ $kind == gpu || $(uname -s) != Linux ]]; then cpu_index=; fi  # elsewhere plain torch is it

stamp=$(cksum <"$root/pyproject.toml")
stamped() { [[ -x $python && $(cat "$venv/installed-$1" 2>/dev/null) == "$stamp" ]]; }
ready() { for group in "${groups[@]}"; do stamped "$group" || return 1; done; }

step() { { echo "+ $*" && "$@"; } >>"$log" 2>&1 </dev/null; }
failed() {  # one line says why, or the log's last ones do
  local why
  why=$("$python3" "$tool" cause "$log") || tail -n 8 "$log" >&2
  die "$1 failed${why:+: $why} ($log); start again to go on from here"
}

find_python() {  # the newest that can make an environment; pyenv's shims answer for none
  local reason= answer
  for python3 in python3.14 python3.13 python3.12 python3.11 python3; do
    if answer=$("$python3" "$tool" suitable 2>/dev/null); then return; fi
    reason=${reason:-$answer}
  done
  die "needs Python 3.11 to 3.14 on the PATH, as python3 or python3.11 ...${reason:+; $reason}"
}

install_group() {  # in one call of pip, after one for torch if that has an index of its own
  "$python" "$tool" missing "$root" "$cpu_index" "$1" | while read -ra wanted; do
    say "installing ${wanted[*]}"
    index=$("$python" "$tool" index "$cpu_index" "${wanted[0]}" 2>>"$log") ||
      failed "asking $cpu_index for torch's CPU build (PIP_EXTRA_INDEX_URL names another index)"
    # Python compiles what it imports, a quarter of what pip would. If it may not keep it, pip does.
    step "$python" -m pip install --no-input --no-compile ${PYTHONDONTWRITEBYTECODE:+--compile} \
      ${index:+"--extra-index-url=$index"} "${wanted[@]}" || failed "installing ${wanted[*]}"
  done
  if [[ $1 == cpu ]]; then  # Transformers imports these, built for CUDA
    step "$python" -m pip uninstall -y torchvision torchaudio torchcodec || failed "pip uninstall"
  fi
  echo "$stamp" >"$venv/installed-$1"
}

install() {
  local why
  find_python
  why=$({ mkdir -p "$venv" && : >>"$log"; } 2>&1) ||
    die "no .venv can be made in $root (${why##*: }): clone it to where you may write," \
      "or activate an environment that has what pyproject.toml lists"
  exec 9>>"$venv/lock"
  "$python3" "$tool" lock 9 "$log"
  if [[ $kind == gpu && -e $venv/installed-cpu ]]; then  # the two builds of vLLM share their files
    say "making .venv anew: it was made without a GPU"
    rm -rf "$venv/bin"
  fi
  if [[ -e $venv/creating ]] || ! "$python" -m pip --version >/dev/null 2>&1; then
    say "creating .venv with $("$python3" --version)"
    rm -rf "$venv"/{bin,include,lib,lib64,pyvenv.cfg} "$venv"/installed-*
    : >"$venv/creating"
    step "$python3" -m venv "$venv" || failed "creating .venv"
    # pip 26 resolves vLLM's requirements in a third of the time that 23 takes. One that was cut
    # while it replaced itself may still answer --version; so a file tells that this is not done.
    step "$python" -m pip install --upgrade --timeout 8 --retries 0 pip || failed "upgrading pip"
    rm "$venv/creating"
  fi
  # pip writes INSTALLER last: a package without it is half there, yet pip calls it installed.
  find "$venv"/lib -maxdepth 3 -name '*.dist-info' ! -exec test -e '{}/INSTALLER' \; \
    -prune -exec rm -rf '{}' +
  for group in "${groups[@]}"; do stamped "$group" || install_group "$group"; done
  exec 9>&-
}

yours=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
if [[ $yours == "$venv" ]]; then yours=; fi
if [[ $yours ]] || ! ready; then
  if [[ ! $yours && -e $venv && ! -e $venv/lock ]]; then yours=$venv; fi  # made without launch.sh
  active=$(command -v "${yours:+$yours/bin/}python3") || active=python3
  status=0
  index=$(ready || echo "$cpu_index")  # for the command that is shown; a second start is quick
  answer=$("$active" "$tool" lacking "$root" "$index" "${groups[@]}" 2>/dev/null) || status=$?
  IFS=$'\t' read -r lacking add <<<"$answer"
  if ((status == 0)) && [[ $active != "$venv"/* || ! -e $venv/lock ]]; then
    python=$active
  elif ! ready; then
    [[ $yours != "$venv" ]] ||
      die "$venv was not made by launch.sh and lacks $lacking; remove it, or run: $add"
    ((status != 3)) || die "$active lacks $lacking; add it with: $add"  # no second 4 GB for that
    say "$active lacks ${lacking:-Python}; using .venv${add:+; to use $active: $add}"
    install
  fi
fi

if [[ $gpus ]]; then
  default CUDA_DEVICE_ORDER PCI_BUS_ID  # nvidia-smi's order; CUDA's own is fastest first
  # NVLink multicast helps all-reduce only; it fails or hangs where the fabric manager is not well,
  # or where many groups use up its 128 slots (NVIDIA/nccl 1197, 2077).
  default NCCL_NVLS_ENABLE 0
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}  # for scripts below the root
case $1 in
  python) exec "$python" "${@:2}" ;;
  pytest) exec "$python" -m pytest "${@:2}" ;;
esac

# Where the GPUs sit, and the start.
binding=
if ((num_gpus > 0)); then
  nccl=$(env | grep '^NCCL_[^V]' | sort | paste -sd' ' -)  # NCCL_VERSION labels an image
  say "NCCL decides, except for $nccl"
  matrix=$(nvidia-smi topo -m 2>/dev/null) || matrix=
  numactl=$(numactl --show 2>/dev/null) || numactl=  # fails in a container that forbids it
  visible=$(cut -d, -f1-"$num_ranks" <<<"$visible")
  binding=$("$python" "$tool" topology "$visible" "$gpus" "$matrix" "$numactl") || binding=
fi
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
default OMP_NUM_THREADS $((cores > num_ranks ? cores / num_ranks : 1))  # torchrun's default is 1
default OMP_WAIT_POLICY PASSIVE  # spinning threads on shared cores made a step 7 x slower
net=(--standalone)  # a free port, bound by the process that keeps it
if ((${NNODES:-1} > 1)); then
  net=(--nnodes "$NNODES" --node-rank "$NODE_RANK")
  net+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
exec "$python" "$tool" torchrun "${net[@]}" ${binding:+"$binding"} \
  --nproc-per-node "$num_ranks" "$script" "${@:2}"
