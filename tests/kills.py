"""Kills a small run at random moments, starts it again, and compares what it ends with bit by bit
with a run that nobody disturbed.

    bash launch.sh python tests/kills.py --kills 200 --ranks 2
    bash launch.sh python tests/kills.py --kills 20 --ranks 2 --torchrun --script ppo

Half of the kills come while a state is being saved, half at any moment, the start included.
SIGKILL, SIGTERM and SIGINT go to a rank, to the launcher, or to all processes. The ranks are forks
of this process, which start in a second, under a launcher of a few lines; --torchrun takes
launch.sh's. The data have an epoch's end every other step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo
from tiny import save_tiny

import grpo
import ppo
import run

ROOT = Path(grpo.__file__).parent

SCRIPTS = {"grpo": grpo, "ppo": ppo}
NUM_STEPS = 16
GRACE_S = 20  # that the launcher leaves the others, once a rank has failed
MACHINE = ("timing_s/", "perf/", "throughput/", "memory/", "communication/")
KILLS = [(number, victim) for number in (9, 15, 2) for victim in ("rank", "launcher", "all")]
REWARDS = "def spread(response):\n    return sum(map(ord, response)) % 5 / 4\n"


def flags(directory: Path, script: str, out: Path) -> list[str]:
    more = "--resample-tries 2 --loss.kl-coef 0.1 --refresh-every 3"
    if script == "ppo":
        more = "--rollout-every 2 --gae.kl-coef 0.1 --gae.kl-target 0.01"
    every = 2 if script == "ppo" else 1
    words = f"""--model {directory}/model --data {directory}/data.jsonl --output-dir {out} --name x
        --num-steps {NUM_STEPS} --learning-rate 1e-3 --save-every {every} --rollout.engine hf
        --prompts-per-step 8 --group-size 4 --num-minibatches 2 --tokens-per-row 512 --num-epochs 2
        --data.max-prompt-tokens 16 --rollout.max-response-tokens 6 --log.plot-every 0
        --reward.functions {directory}/rewards.py:spread --reward.num-workers 1 {more}"""
    return words.split()


class Job:
    """A launcher and its ranks. What they print is added to `log`."""

    def __init__(self, script: str, num_ranks: int, words: list[str], log: Path, torchrun: bool):
        if torchrun:
            command = [sys.executable, ROOT / "tools" / "launch.py", "torchrun", "--standalone"]
            command += ["--nproc-per-node", str(num_ranks), ROOT / f"{script}.py", *words]
            with open(log, "a") as out:
                options = dict(stdout=out, stderr=out, start_new_session=True)
                self.pid = subprocess.Popen(command, **options).pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            with open(log, "a") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            launch(script, num_ranks, words)

    def wait(self, limit_s: float) -> int | None:
        """The exit code, or None if it still runs after limit_s."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        return None


def launch(script: str, num_ranks: int, words: list[str]) -> None:
    """Fork the ranks, pass signals on, end all if one fails. Does not return."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="kills")
    os.environ.update(WORLD_SIZE=str(num_ranks))
    ranks = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            train(script, words)
        ranks.append(pid)

    def pass_on(number, frame):
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, pass_on)
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            code = code or os.waitstatus_to_exitcode(status)
            pass_on(signal.SIGTERM, None)
            signal.signal(signal.SIGALRM, lambda *_: pass_on(signal.SIGKILL, None))
            signal.alarm(GRACE_S)
    os._exit(code % 256)


def train(script: str, words: list[str]) -> None:
    try:
        torch.set_num_threads(1)
        sys.argv = [f"{script}.py", *words]
        entry = SCRIPTS[script]
        entry.main(run.command_line(entry.Args(), {}, ""))
        run.leave()
    except BaseException:  # what a fork raises must not go on in the code of its parent
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def tree(pid: int) -> list[int]:
    """The process and all below it, from the top."""
    found = [pid]
    for each in found:
        found += children(each)
    return found


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(job: Job, number: int, victim: str, draw: random.Random) -> None:
    """The signal to the victim; then wait until no process of the job is left."""
    processes = tree(job.pid)
    ranks = children(job.pid)
    chosen = {"rank": [draw.choice(ranks)] if ranks else [job.pid], "launcher": [job.pid]}
    for pid in chosen.get(victim, processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    code = job.wait(90)
    until = time.monotonic() + 60  # the ranks of a launcher that is gone finish their step
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.01)
    left = [pid for pid in processes if is_running(pid)]
    assert code is not None, f"the launcher still runs 90 s after signal {number} to {victim}"
    assert not left, f"60 s after signal {number} to {victim} there are still {left}"


def result(directory: Path) -> dict:
    """What a run has made, without times and memory."""
    records = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line).items() for line in records]
    records = [{k: x for k, x in each if not k.startswith(MACHINE)} for each in records]
    made = {"metrics": records}
    for file in ("samples.jsonl", "hf/model.safetensors"):
        made[file] = (directory / file).read_bytes()
    newest = max((directory / "checkpoints").glob("step-*"))
    for file in newest.glob("*.distcp"):
        made[f"{newest.name}/{file.name}"] = file.read_bytes()
    for file in newest.glob("rank*.pt"):
        state = torch.load(file, weights_only=False)["state"]
        generators = state["generators"]
        generators.pop("python")  # seeded by nobody and used by nobody, as numpy's
        generators.pop("numpy")
        made[f"{newest.name}/{file.name}"] = str(state) + str(generators["torch"].tolist())
    return made


def is_saving(out: Path) -> bool:
    return any((out / "x" / "checkpoints").glob(".step-*"))


def main(args: argparse.Namespace) -> None:
    draw = random.Random(args.seed)
    directory = Path(tempfile.mkdtemp(prefix="kills-"))
    os.environ["TMPDIR"] = str(directory / "tmp")
    tempfile.tempdir = None
    (directory / "tmp").mkdir()
    save_tiny(directory / "model")
    (directory / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(i)} for i in range(16)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(out: Path) -> Job:
        words = flags(directory, args.script, out)
        if any((out / "x" / "checkpoints").glob("step-*")):
            words.append("--resume")
        return Job(args.script, args.ranks, words, directory / "log", args.torchrun)

    begin = time.monotonic()
    assert start(directory / "whole").wait(600) == 0, (directory / "log").read_text()
    whole_s = time.monotonic() - begin
    expected = result(directory / "whole" / "x")
    print(f"undisturbed: {whole_s:.1f} s for {NUM_STEPS} steps", flush=True)

    num_kills = num_saving = num_runs = 0
    while num_kills < args.kills or num_runs == 0:
        out = directory / f"run{num_runs}"
        while True:
            job = start(out)
            in_save = draw.random() < 0.5
            code = None
            if num_kills < args.kills:
                if in_save:
                    until = time.monotonic() + draw.uniform(0, 0.3) * whole_s
                    while code is None and (time.monotonic() < until or not is_saving(out)):
                        code = job.wait(0.001)
                    time.sleep(draw.uniform(0, 0.02))
                else:
                    code = job.wait(draw.uniform(0, 0.3) * whole_s)
            else:
                code = job.wait(600)
            if code == 0:
                break
            assert code is None, f"exit code {code}\n{(directory / 'log').read_text()[-3000:]}"
            number, victim = draw.choice(KILLS)
            num_saving += is_saving(out)
            kill(job, number, victim, draw)
            num_kills += 1
            print(f"{num_kills}: signal {number} to {victim}", flush=True)
        found = result(out / "x")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == value, f"run {num_runs}: another {name} than undisturbed"
        num_runs += 1
        shutil.rmtree(out)
    log = (directory / "log").read_text()
    assert "damaged" not in log
    left = [path.name for path in (directory / "tmp").iterdir()]
    # torchrun's, of launchers that had no time to remove it.
    assert all(name.startswith("torchrun_") for name in left), left
    stops = log.count("saved; the same command with --resume goes on")
    print(f"{num_kills} kills, {num_saving} of them while a state was being saved")
    print(f"{stops} stops with a save, {log.count('resume: from')} starts from a state")
    print(f"{num_runs} runs ended bit-equal to the undisturbed one, and nothing is left")
    shutil.rmtree(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--script", choices=sorted(SCRIPTS), default="grpo")
    parser.add_argument("--torchrun", action="store_true", help="launch.sh's launcher")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
