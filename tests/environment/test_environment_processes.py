"""Processes that are started as an engine would start them meet, and train a step together."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.testing.hosts import Hosts

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, paceline
run = paceline.join(name="engine", checkpoint_keep=0, join_limit_s=30, wait_limit_s=30, seed=7)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
for _ in run.epochs(1):
    (-(run.rank + 1.0) * model(torch.ones(1, 1))).sum().backward()
    optimizer.step()
print(f"rank {run.rank} of {run.size}: {model.weight.item():g}", flush=True)
"""
HIDDEN = ("PACELINE_", "SLURM_", "OMPI_", "PMI", "MASTER_", "RANK", "WORLD_", "LOCAL_", "TORCHELASTIC", "KUBERNETES_")


def clean(home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN)}
    return kept | {"XDG_CONFIG_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def slurm(rank: int, job: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "here",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def pmi(rank: int, port: str) -> dict[str, str]:
    numbers = {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2}
    return {name: str(value) for name, value in numbers.items()} | {"MASTER_PORT": port}


def pod(rank: int, port: str) -> dict[str, str]:
    """Of a TrainJob; both pods stand on this host here, which only shows in their addresses."""
    return {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "PACELINE_TOKEN": "a long random text",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }


def start(tmp_path: Path, envs: list[dict[str, str]], script: str = SCRIPT) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    (tmp_path / "script.py").write_text(script)
    pipe = subprocess.PIPE
    programs = [
        subprocess.Popen(
            [sys.executable, "script.py"], env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
        for env in envs
    ]
    try:
        said = [program.communicate(timeout=120) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return [(program.returncode, out, errors) for program, (out, errors) in zip(programs, said)]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (slurm, "paceline: 2 members, started by Slurm job {}, step 0\n"),
        pytest.param(pmi, "paceline: 2 members, started by mpiexec\n", marks=pytest.mark.slow),
        pytest.param(pod, "paceline: 2 members, started by Kubernetes TrainJob\n", marks=pytest.mark.slow),
    ],
    ids=["slurm", "pmi", "kubernetes"],
)
def test_members_of_an_engine_train(engine, words, tmp_path):
    id = free_port() if engine is not slurm else str(os.getpid())
    ended = start(tmp_path, [clean(tmp_path) | engine(rank, id) for rank in range(2)])
    for rank, (code, out, errors) in enumerate(ended):
        assert code == 0, errors
        assert f"rank {rank} of 2: 1.5\n" in out
    assert words.format(id) in ended[0][2]
    assert "started by" not in ended[1][2]
    assert (tmp_path / "runs/engine/events/rank-1.jsonl").exists()
    secret = tmp_path / "paceline/secret"
    assert secret.exists() == (engine is not pod)
    assert engine is pod or secret.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_another_users_process_is_not_let_in(tmp_path):
    """Rank 1 has another home, and so another secret, as somebody else's would."""
    job = str(os.getpid())
    envs = [clean(tmp_path / "mine") | slurm(0, job), clean(tmp_path / "other") | slurm(1, job)]
    short = SCRIPT.replace("join_limit_s=30", "join_limit_s=5")
    assert short != SCRIPT
    (_, _, waited), (code, _, refused) = start(tmp_path, envs, short)
    assert code == 1
    assert "AuthError: the listener at 127.0.0.1:" in refused
    assert "does not hold the same token" in refused
    assert "TimedOut: member 1 of 2 did not arrive within 5 s" in waited


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ((code, _, errors),) = start(tmp_path, [clean(tmp_path) | pmi(0, port)])
    assert code == 1
    assert f"ConfigError: member 0 of mpiexec keeps the rendezvous at 127.0.0.1:{port}, and cannot listen" in errors
    assert "MASTER_PORT to a free port" in errors


@pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing() or "hosts can be made")
@pytest.mark.slow
def test_tasks_of_two_hosts_meet_by_the_list_of_hosts(tmp_path):
    """Two network namespaces are the hosts, and their addresses the names in Slurm's list."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with Hosts(2) as hosts:
        first = hosts.ips[0].rpartition(".")[0]
        programs = []
        for rank in range(2):
            more = {"SLURM_STEP_NODELIST": f"{first}.[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            more |= {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURMD_NODENAME": hosts.ips[rank]}
            env = clean(tmp_path) | slurm(rank, "12") | more
            hidden = {name: "" for name in os.environ if name not in env}
            pipe = subprocess.PIPE
            command = [sys.executable, "script.py"]
            programs.append(
                hosts.popen(rank, command, env | hidden, cwd=tmp_path, stdout=pipe, stderr=subprocess.STDOUT, text=True)
            )
        said = [program.communicate(timeout=120)[0] for program in programs]
        codes = [program.returncode for program in programs]
    assert codes == [0, 0], said
    assert "rank 0 of 2: 1.5" in said[0], said
    assert "rank 1 of 2: 1.5" in said[1], said


MPIRUN = shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: apt-get install openmpi-bin")
@pytest.mark.slow
def test_mpirun_trains_the_digits(tmp_path):
    pytest.importorskip("sklearn")
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    done = subprocess.run(
        [*command, ROOT / "examples/digits.py"],
        env=clean(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert "2 members, started by Open MPI's mpirun" in done.stderr
    accuracy = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("test accuracy:")]
    assert len(accuracy) == 1
    assert float(accuracy[0].rstrip("%")) >= 97.0


RAY_DRIVER = """
import ray, sys
from ray.train import ScalingConfig, RunConfig

def loop():
    exec(compile(open(sys.argv[0] + "/script.py").read(), "script.py", "exec"), {"__name__": "__main__"})

def trainer(kind):
    if kind == "torch":
        from ray.train.torch import TorchTrainer
        return TorchTrainer
    try:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError:
        from ray.train.data_parallel_trainer import DataParallelTrainer
    return DataParallelTrainer

if __name__ == "__main__":
    directory, kind = sys.argv[1:]
    ray.init(num_cpus=3, include_dashboard=False)
    config = RunConfig(name="digits", storage_path=directory + "/ray")
    trainer(kind)(loop, scaling_config=ScalingConfig(num_workers=2), run_config=config).fit()
    ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [("plain", "Ray Train digits"), ("torch", "torchrun")])
def test_workers_of_ray_train_meet(kind, words, tmp_path):
    """Ray's TorchTrainer sets what torchrun sets, its other trainers nothing."""
    pytest.importorskip("ray.train", reason="no ray: pip install 'ray[train]'")
    (tmp_path / "script.py").write_text(f'import os; os.chdir("{tmp_path}")\n' + SCRIPT)
    (tmp_path / "driver.py").write_text(RAY_DRIVER.replace("sys.argv[0]", repr(str(tmp_path))))
    done = subprocess.run(
        [sys.executable, "driver.py", str(tmp_path), kind],
        env=clean(tmp_path) | {"RAY_DEDUP_LOGS": "0"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "rank 0 of 2: 1.5" in said
    assert "rank 1 of 2: 1.5" in said
    assert f"2 members, started by {words}" in said
