"""`--on slurm` without a Slurm: what would be submitted or started, and what is said when it cannot be."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from paceline.cli import run as run_command
from paceline.cli.display import Display
from paceline.core.errors import ConfigError
from paceline.launch import held, jobs, reach, record
from paceline.launch.engines import slurm
from paceline.launch.words import words

SECRET = "not-to-be-seen"


class Commands:
    """Stand-ins for Slurm's commands, each a line of shell."""

    def __init__(self, folder: Path, **lines: str) -> None:
        self.dir = folder
        folder.mkdir()
        for name, line in lines.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o755)

    def paceline(self, *given: str, **env: str) -> subprocess.CompletedProcess[str]:
        cwd = self.dir.parent
        (cwd / "train.py").touch()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        environ = inherited | {"PATH": f"{self.dir}:/nowhere"} | env
        command = [sys.executable, "-m", "paceline", *given]
        return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120)

    def submit(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.paceline("run", "-n", "4", "--on", "slurm", "--name", "big", *options, "train.py", **env)


INSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "4",
}


def test_the_script_is_printed_as_it_would_be_submitted(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "bin", sbatch=f"/bin/cp $2 {tmp_path}/given; echo $KEY > {tmp_path}/key; echo 7")
    options = ("--nodes", "2", "--time", "2:00:00", "--partition", "gpu", "--account", "me", "--gpus", "2", "--requeue")
    more = ("--sbatch=--qos=high --mem=16G", "--threads", "3", "--env", f"KEY={SECRET}")
    shown = commands.submit(*options, *more, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "runs").exists()
    done = commands.submit(*options, *more)
    assert done.returncode == 0, done.stderr
    given = (tmp_path / "given").read_text()
    assert shown.stdout == given
    asked = {line.removeprefix("#SBATCH ") for line in given.splitlines() if line.startswith("#SBATCH")}
    assert asked >= {"--ntasks=4", "--nodes=2", "--time=2:00:00", "--partition=gpu", "--account=me", "--no-kill"}
    assert asked >= {"--gpus-per-node=2", "--qos=high", "--mem=16G", "--cpus-per-task=3", "--requeue"}
    assert asked >= {"--job-name=big", f"--output={tmp_path}/runs/big/logs/slurm-%j.out", "--signal=B:USR1@60"}
    subprocess.run(["bash", "-n"], input=given, text=True, check=True)
    assert SECRET not in given
    assert (tmp_path / "key").read_text().strip() == SECRET  # in the environment, which Slurm carries
    kept = tmp_path / "runs" / "big" / "slurm.sh"
    assert kept.read_text() == given
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "Slurm job 7" in done.stdout + done.stderr
    assert "paceline logs big --follow" in done.stdout + done.stderr
    found = held.read(tmp_path / "runs" / "big")
    assert found
    assert (found.engine, found.id, found.log) == ("slurm", "7", f"{tmp_path}/runs/big/logs/slurm-7.out")


def test_the_job_runs_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", SECRET)
    line = (
        "-n 2:4 --on slurm --replacements 7 --silence-s 2.5 --threads 2 --label gpu:0,1 --env KEY --name big --seed 3"
    )
    line += " --root '/data/my runs' --checkpoint-every-s 0.1 --check-finite --strategy 'diloco(every=100)'"
    line += " -m package.train --fresh -n 9 'two words'"
    _, _, spec, _ = run_command._asked(shlex.split(line))
    _, _, again, _ = run_command._asked(words(spec, "slurm"))
    assert again == spec
    assert SECRET not in words(spec, "slurm")


@pytest.mark.parametrize(("restarted", "fresh"), [("", True), ("1", False)])
def test_a_job_that_waited_again_does_not_start_over(tmp_path: Path, restarted: str, fresh: bool) -> None:
    done = Commands(tmp_path / "bin").submit("--fresh", "--requeue", "--dry-run")
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n')
    launcher.chmod(0o755)
    text = done.stdout.replace(sys.executable, str(launcher))
    env = {"PATH": os.environ["PATH"], **({"SLURM_RESTART_COUNT": restarted} if restarted else {})}
    subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=30)
    told = (tmp_path / "words").read_text().split()
    assert ("--fresh" in told, told[-1]) == (fresh, "train.py")


@pytest.mark.parametrize(
    ("signal", "code", "preempted", "again"),
    [
        ("USR1", 143, "None", True),
        ("USR1", 0, "None", False),
        ("TERM", 143, "None", False),
        ("TERM", 1, "2026-11-16", True),
    ],
)
def test_what_the_script_does_when_it_is_signalled(
    tmp_path: Path, signal: str, code: int, preempted: str, again: bool
) -> None:
    """Put back into the queue: before its time is over, or when its nodes are taken, unless the run has finished."""
    line = f'[ $1 = show ] && echo "PreemptTime={preempted}" || echo "$@" > {tmp_path}/said'
    commands = Commands(tmp_path / "bin", scontrol=line)
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f"#!/bin/bash\ntrap 'exit {code}' TERM\ntouch {tmp_path}/ready\nwhile :; do read -t 0.05 <> <(:); done\n"
    )
    launcher.chmod(0o755)
    text = commands.submit("--requeue", "--dry-run").stdout.replace(sys.executable, str(launcher))
    env = {"PATH": f"{commands.dir}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", text], env=env) as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        subprocess.run(["kill", f"-{signal}", str(process.pid)], check=True)
        assert process.wait(30) == code
    said = tmp_path / "said"
    assert (said.read_text().strip() if said.exists() else "") == ("requeue 7" if again else "")


def test_slurm_is_not_installed(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "bin")
    done = commands.submit()
    assert done.returncode == 2
    assert "--on slurm needs sbatch, which is not installed here: apt-get install slurm-client" in done.stderr
    assert "--on slurm needs srun" in commands.submit(**INSIDE).stderr
    assert not (tmp_path / "runs").exists()


def test_sbatch_refuses(tmp_path: Path) -> None:
    refuses = "echo 'sbatch: error: Batch job submission failed: Invalid account or account/partition' >&2; exit 1"
    done = Commands(tmp_path / "bin", sbatch=refuses).submit("--account", "nobody")
    assert done.returncode == 2
    assert "sbatch refuses: Batch job submission failed: Invalid account or account/partition; sacctmgr" in done.stderr
    assert not (tmp_path / "runs" / "big").exists()


@pytest.mark.parametrize(
    ("queue", "shown"),
    [
        ("echo 'PENDING|Resources|'", "Slurm job 7 waits for nodes that are in use (Resources), for"),
        ("echo 'PENDING|Licenses|'", "Slurm job 7 waits (Licenses), for"),
        ("echo 'RUNNING|None|n[1-2]|'", "Slurm job 7 runs on n[1-2]"),
        ("exit 1", "Slurm job 7 ended: node fail with exit code 1; the last lines of"),
    ],
)
def test_a_run_that_has_not_begun(tmp_path: Path, queue: str, shown: str) -> None:
    told = "echo 'JobId=7 JobState=NODE_FAIL ExitCode=1:0'"
    commands = Commands(tmp_path / "bin", sbatch="echo '7;cluster'", squeue=queue, scontrol=told, scancel="exit 0")
    assert commands.submit().returncode == 0
    (tmp_path / "runs/big/logs/slurm-7.out").write_text("so it ended\n")
    status = commands.paceline("status", "big")
    assert status.stdout.startswith(f"big: {shown}"), status
    assert ("so it ended" in status.stdout) == shown.endswith("lines of")
    for what in (("logs", "big"), ("scale", "big", "3")):
        done = commands.paceline(*what)
        assert done.returncode == 2
        assert f"run 'big' has not begun: {shown}" in done.stderr
    ended = {"w": "is taken back", "r": "is told to end", "e": "is over already"}[shown.split()[3][0]]
    assert ended in commands.paceline("stop", "big").stdout
    if shown.endswith("lines of"):
        done = commands.paceline("logs", "big", "--follow")
        assert "run 'big' did not begin: Slurm job 7 ended" in done.stderr
        assert commands.submit().returncode == 0  # the one before is over
    else:
        assert "run 'big' is Slurm job 7 already: paceline stop big first" in commands.submit().stderr


def test_in_an_allocation_an_agent_is_started_on_each_node(tmp_path: Path) -> None:
    done = Commands(tmp_path / "bin").submit("--dry-run", **INSIDE, SLURM_CPUS_PER_TASK="2")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "srun" in line)
    command = shlex.split(line)
    assert command[:5] == ["env", "-u", "SLURM_CPUS_PER_TASK", "srun", "--nodelist=localhost"]
    assert command[-6:] == ["-", "--together", "--name", "localhost", "--slots", "4"]


def test_too_few_slots_in_an_allocation(tmp_path: Path) -> None:
    env = INSIDE | {"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "3"}
    done = Commands(tmp_path / "bin").submit("--dry-run", **env)
    assert "4 members need as many slots, and Slurm job 7 has 3 tasks: localhost (3)" in done.stderr


def test_names_that_only_slurm_knows(tmp_path: Path) -> None:
    told = "echo 'NodeName=n1 NodeAddr=127.0.0.1 NodeHostName=x'"
    env = INSIDE | {"SLURM_JOB_NODELIST": "n1.invalid"}
    done = Commands(tmp_path / "bin", scontrol=told).submit("--dry-run", **env)
    assert "# the scheduler here, at 127.0.0.1:<port>" in done.stdout


def test_one_of_several_tasks_starts_no_run(tmp_path: Path) -> None:
    env = INSIDE | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    done = Commands(tmp_path / "bin").submit("--dry-run", **env)
    assert "this is one of 4 tasks of srun, and each would start the run" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hosts", "a,b"), "the hosts are the nodes of the job"),
        (("--nodes", "two"), "--nodes 'two': give a number of nodes"),
        (("--strategy", "async", "--hosts", "a,b"), "the hosts are the nodes of the job"),
        (("--mesh", "shard=3"), "shard=3"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    done = Commands(tmp_path / "bin").submit("--dry-run", *options)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("--strategy", "async"), "-n 4 --on slurm --name big --strategy async train.py"),
        (("--strategy", "sync", "--replacements", "2"), "-n 1:4 --on slurm --replacements 2 --name big"),
        (("--strategy", "async", "--silence-s", "9"), "--silence-s 9.0"),
        (("--mesh", "shard=2", "--port", "29400"), "-n 4 --on slurm --port 29400 --name big --mesh shard=2 train.py"),
    ],
)
def test_runs_whose_members_stay_are_submitted_as_they_were_asked_for(
    tmp_path: Path, given: tuple[str, ...], shown: str
) -> None:
    done = Commands(tmp_path / "bin").submit("--dry-run", *given)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert "#SBATCH --ntasks=4" in done.stdout


def test_members_that_stay_have_a_step_each(tmp_path: Path) -> None:
    done = Commands(tmp_path / "bin").submit("--strategy", "async", "--dry-run", **INSIDE)
    assert done.returncode == 0, done.stderr
    assert "# host localhost: rank 0, 1, 2, 3; server 4" in done.stdout
    assert re.search(r"srun --nodelist=localhost .* -P -m paceline.launch.far$", done.stdout, flags=re.M)


def test_a_gpu_is_not_looked_for_where_a_job_is_submitted(tmp_path: Path) -> None:
    done = Commands(tmp_path / "bin").submit("--device", "cuda", "--dry-run")
    assert "--device cuda" in done.stdout, done.stderr


def test_a_share_for_each_node_where_nobody_asked_for_tasks() -> None:
    assert slurm.rooms({"SLURM_JOB_NODELIST": "a,b,c"}, 4) == {"a": 2, "b": 2, "c": 2}


def test_slurm_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    Commands(tmp_path / "bin", squeue="sleep 5")
    monkeypatch.setattr(jobs, "_LIMIT_S", 0.1)
    with pytest.raises(ConfigError, match="squeue did not answer within"):
        jobs.ask("7")


def begun(folder: Path, **more: object) -> Path:
    """The directory of a run that was submitted as job 7, and whose launcher is or was on another node."""
    directory = folder / "runs" / "big"
    (directory / "logs").mkdir(parents=True)
    now = time.time()
    run = record.Run(name="big", command=[], size=1, pid=1, host="n1", started=now, least=1)
    (directory / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(run, **more)))
    (directory / "logs" / "rank-0.log").write_text("first\n")
    held.write(directory, held.Held(engine="slurm", id="7", at=now - 60))
    return directory


def test_following_ends_with_the_job_where_the_launcher_was_killed(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "bin", squeue="", scontrol="echo JobState=NODE_FAIL ExitCode=0:0")
    reach.write(begun(tmp_path), reach.Reach(address="127.0.0.1:1", token="x"))  # left behind
    done = commands.paceline("logs", "big", "--follow")
    assert (done.returncode, done.stdout) == (0, "[0] first\n"), done.stderr


def test_following_goes_on_while_the_job_waits_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    asked = f"echo >> {tmp_path}/asked; /bin/cat {state}"
    commands = Commands(tmp_path / "bin", squeue=asked, scontrol="echo JobState=COMPLETED ExitCode=0:0")
    state.write_text("PENDING|BeginTime||\n")
    directory = begun(tmp_path, finished=time.time(), exit_code=143)

    def goes_on() -> None:
        while not (tmp_path / "asked").exists():
            time.sleep(0.05)
        with (directory / "logs" / "rank-0.log").open("a") as log:
            log.write("second")  # a last line need not be whole
        state.write_text("")

    thread = threading.Thread(target=goes_on, daemon=True)
    thread.start()
    done = commands.paceline("logs", "big", "--follow")
    assert (done.returncode, done.stdout) == (0, "[0] first\n[0] second\n"), done.stderr
    assert commands.paceline("logs", "big").stdout == done.stdout


def test_again_keeps_what_the_job_was_asked_for(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "bin", sbatch="echo 7", srun="exit 1")
    options = ("--nodes", "2", "--partition", "gpu", "--time", "2:00:00")
    assert commands.submit(*options).returncode == 0
    before = commands.paceline("run", "--again", "big", "--dry-run")  # while it waits
    assert {f"#SBATCH --{name}" for name in ("nodes=2", "partition=gpu", "time=2:00:00")} <= set(
        before.stdout.splitlines()
    ), before.stderr
    recipe = tmp_path / "runs" / "big" / "recipe.toml"
    kept = recipe.read_text()
    held_ = held.read(recipe.parent)
    assert held_
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", held_.id)  # in the job, which is started without these options
        run_command._keep({"script": "train.py"}, recipe.parent, Display(1))
        assert recipe.read_text() == kept
        patch.setenv("SLURM_JOB_ID", "8")  # by hand, in another one
        run_command._keep({"script": "train.py"}, recipe.parent, Display(1))
        assert recipe.read_text() != kept


def test_runs_that_wait_are_listed_with_the_others(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "bin", sbatch="echo 7", squeue="echo 'PENDING|Priority||'")
    assert commands.submit().returncode == 0
    done = commands.paceline("status", "--all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("big   submitted  Slurm job 7 waits others are before it (Priority), for ")
    assert "no run in 'runs' has begun" in commands.paceline("status").stderr
    (tmp_path / "runs" / "big").rename(tmp_path / "runs" / "later")
    begun(tmp_path, started=1.0)
    first, second = commands.paceline("status", "--all").stdout.splitlines()
    assert (first.split()[0], second.split()) == ("later", ["big", "1", "member", "on", "n1"])
    (commands.dir / "squeue").unlink()  # not a host that can ask
    done = commands.paceline("status", "--all")
    assert "the queue cannot be asked" in done.stdout, done.stderr
