"""Where a process believes to stand when Slurm, MPI, Kubernetes or Ray has started it, and who wins over whom."""

from __future__ import annotations

import sys
import types

import pytest

from paceline.core.errors import ConfigError
from paceline.environment import crowd, detect, hostlist, this_host

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURMD_NODENAME": "gpu09",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1059454977",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PODS = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PACELINE_TOKEN": "secret"}
JOBSET = PODS | {
    "JOB_COMPLETION_INDEX": "2",
    "WORLD_SIZE": "4",
    "JOBSET_NAME": "digits",
    "REPLICATED_JOB_NAME": "members",
}
TRAIN_JOB = PODS | {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29500",
}
PYTORCH_JOB = PODS | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456"}
OPERATOR = PYTORCH_JOB | {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
REPLICAS = JOBSET | {"JOB_COMPLETION_INDEX": "0", "REPLICATED_JOB_REPLICAS": "4"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OURS = {
    "PACELINE_RANK": "0",
    "PACELINE_SIZE": "4",
    "PACELINE_LOCAL_RANK": "0",
    "PACELINE_LOCAL_SIZE": "4",
    "PACELINE_SERVERS": "0",
    "PACELINE_RENDEZVOUS": "127.0.0.1:2940",
    "PACELINE_TOKEN": "secret",
}


def numbers(env):
    place = detect(env)
    return place.kind, place.rank, place.size, place.local_rank, place.local_size


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


# ---- each by itself


def test_a_task_of_srun():
    place = detect(SLURM)
    assert numbers(SLURM) == ("slurm", 3, 5, 1, 2)
    assert (place.keeps, place.launched, place.token, place.host) == (True, False, "", this_host())
    host, _, port = place.rendezvous.partition(":")
    assert host == "gpu08"
    assert 20_000 <= int(port) < 30_000
    assert place.job == "Slurm job 4711, step 0"
    assert place.other_host == "gpu08"


def test_each_step_and_each_restart_meets_elsewhere():
    starts = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}, {"SLURM_RESTART_COUNT": "1"}]
    places = [detect(SLURM | change) for change in starts]
    assert len({place.job for place in places}) == len({place.rendezvous for place in places}) == len(starts)


def test_tasks_of_one_host_meet_on_loopback():
    one = {"SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_LOCALID": "3"}
    assert detect(SLURM | one).rendezvous.startswith("127.0.0.1:")


def test_slurm_is_told_another_interface_by_address_and_port_together():
    given = {"MASTER_ADDR": "10.1.0.8", "MASTER_PORT": "2900"}
    assert detect(SLURM | given).rendezvous == "10.1.0.8:2900"
    assert detect(SLURM | {"MASTER_ADDR": "10.1.0.8"}).rendezvous.startswith("gpu08:")  # a site's, in every shell


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA], ids=["open-mpi", "pmi"])
def test_a_rank_of_mpirun(names):
    place = detect(names)
    assert numbers(names) == ("mpi", 1, 2, 1, 2)
    assert place.rendezvous.startswith("127.0.0.1:")
    assert place.keeps


def test_pmi_of_cray():
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1", "MASTER_ADDR": "n1"}
    assert numbers(env) == ("mpi", 1, 2, 0, 1)


def test_mpi_over_several_hosts_must_say_where_the_first_is():
    env = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match=r"^Open MPI's mpirun \(1059454977\) has members on several .* MASTER_ADDR"):
        detect(env)
    assert detect(env | {"MASTER_ADDR": "n1"}).rendezvous.startswith("n1:2")
    assert detect(env | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "2900"}).rendezvous == "[fd00::1]:2900"


def test_our_launcher_through_mpirun_keeps_the_rendezvous():
    place = detect(OPEN_MPI | {"PACELINE_RENDEZVOUS": "10.0.0.1:2940", "PACELINE_TOKEN": "t", "PACELINE_SERVERS": "1"})
    assert (place.kind, place.rank, place.launched, place.keeps) == ("mpi", 1, True, False)
    assert (place.rendezvous, place.token, place.servers) == ("10.0.0.1:2940", "t", 1)


@pytest.mark.parametrize(
    ("env", "rank", "size", "rendezvous"),
    [
        (JOBSET, 2, 4, "digits-members-0-0.digits:29400"),
        (without(JOBSET, "JOBSET_NAME") | {"MASTER_ADDR": "first"}, 2, 4, "first:29400"),
        (TRAIN_JOB, 2, 4, "digits-node-0-0.digits:29500"),
        (TRAIN_JOB | {"PET_NNODES": "2:4"}, 2, 4, "digits-node-0-0.digits:29500"),
        (PYTORCH_JOB, 1, 2, "digits-master-0:23456"),
        (OPERATOR, 1, 2, "digits-master-0:23456"),
        (without(OPERATOR, "PET_NODE_RANK", "PET_NNODES"), 1, 2, "digits-master-0:23456"),
        (REPLICAS | {"JOB_INDEX": "3"}, 3, 4, "digits-members-0-0.digits:29400"),
        (REPLICAS | {"HOSTNAME": "digits-members-3-0"}, 3, 4, "digits-members-0-0.digits:29400"),
        (JOBSET | {"HOSTNAME": "digits-members-0-2"}, 2, 4, "digits-members-0-0.digits:29400"),
        (
            JOBSET | {"JOB_COMPLETION_INDEX": "1", "REPLICATED_JOB_REPLICAS": "2", "JOB_INDEX": "1"},
            3,
            4,
            "digits-members-0-0.digits:29400",
        ),
    ],
    ids=[
        "jobset",
        "indexed-job",
        "trainjob",
        "elastic-trainjob",
        "pytorchjob",
        "operator",
        "auto",
        "replicas",
        "replicas-by-name",
        "by-name",
        "replicas-of-two",
    ],
)
def test_a_pod(env, rank, size, rendezvous):
    place = detect(env)
    assert numbers(env) == ("kubernetes", rank, size, 0, 1)
    assert (place.rendezvous, place.token, place.keeps) == (rendezvous, "secret", True)
    assert place.other_host == "10.96.0.1"


@pytest.mark.parametrize("env", [JOBSET, TRAIN_JOB, PYTORCH_JOB], ids=["jobset", "trainjob", "pytorchjob"])
def test_pods_need_a_secret(env):
    with pytest.raises(ConfigError, match=r"^PACELINE_TOKEN is not set in this pod .*kubectl create secret"):
        detect(without(env, "PACELINE_TOKEN"))


def test_a_pod_of_an_indexed_job_may_be_alone():
    place = detect({"JOB_COMPLETION_INDEX": "7"})
    assert (place.kind, place.size) == ("alone", 1)
    assert place.note.startswith("pod 7 of an indexed Job, without WORLD_SIZE")


def test_a_pod_for_several_processes_wants_torchrun():
    with pytest.raises(ConfigError, match=r"^PET_NPROC_PER_NODE='8' .* write torchrun train.py"):
        detect(TRAIN_JOB | {"PET_NPROC_PER_NODE": "8"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"}, r"^PET_NPROC_PER_NODE='4' .* torchrun train.py into the PyTo"),
        ({"WORLD_SIZE": "8"}, r"^PET_NPROC_PER_NODE='auto' asks for several"),
        ({"PET_NODE_RANK": "0"}, r"^RANK='1' contradicts PET_NODE_RANK='0'"),
    ],
)
def test_a_pytorchjob_of_several_processes_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        detect(OPERATOR | change)
    if "PET_NPROC_PER_NODE" in change:
        with pytest.raises(ConfigError, match=message):
            detect(without(OPERATOR | change, "PET_NODE_RANK", "PET_NNODES"))


def test_jobs_that_number_their_pods_alike_are_refused():
    for where in ({"JOB_INDEX": "1"}, {"HOSTNAME": "digits-members-1-0"}):
        with pytest.raises(ConfigError, match=r"^this pod is of Job 1 of a JobSet, .* REPLICATED_JOB_REPLICAS"):
            detect(without(REPLICAS, "REPLICATED_JOB_REPLICAS") | where)
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE=4 is not a multiple of REPLICATED_JOB_REPLICAS=3"):
        detect(REPLICAS | {"REPLICATED_JOB_REPLICAS": "3"})


class Context:
    def __init__(self, rank):
        self._rank = rank

    def get_world_rank(self):
        return self._rank

    def get_world_size(self):
        return 4

    def get_local_rank(self):
        return 1

    def get_local_world_size(self):
        return 2

    def get_experiment_name(self):
        return "digits"


def fake_ray(monkeypatch, initialised=True, context=None):
    """What stands where ray would: as much of it as is asked before anything is exchanged."""

    def get_context():
        if context is None:
            raise RuntimeError("not in a worker")
        return context

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: initialised))
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=get_context))


def test_a_worker_of_ray_train(monkeypatch):
    fake_ray(monkeypatch, context=Context(3))
    assert numbers({}) == ("ray", 3, 4, 1, 2)
    place = detect({})
    assert (place.job, place.rendezvous, place.keeps, place.launched) == ("Ray Train digits", "", True, False)


@pytest.mark.parametrize(("initialised", "context"), [(False, Context(3)), (True, None), (True, Context(None))])
def test_ray_that_is_only_imported_means_nothing(monkeypatch, initialised, context):
    fake_ray(monkeypatch, initialised, context)
    assert detect({}).kind == "alone"


# ---- several at once


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        (SLURM | OURS, "paceline"),  # paceline run within an allocation, or as the one task of a step
        (OPEN_MPI | OURS, "paceline"),
        (JOBSET | OURS, "paceline"),
        (TORCHRUN | SLURM | {"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),  # torchrun as the task of each host
        (TORCHRUN | TRAIN_JOB | {"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        (TORCHRUN | SLURM | {"WORLD_SIZE": "5"}, "torchrun"),  # srun sh -c "RANK=$SLURM_PROCID …", which agrees
        (SLURM | {"WORLD_SIZE": "5"}, "slurm"),  # exported by a batch script, and agrees
        (SLURM | OPEN_MPI, "mpi"),  # mpirun starts its daemons by srun, one task per host
        (SLURM | HYDRA, "mpi"),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "5", "PMIX_RANK": "3"}, "slurm"),  # srun --mpi=pmi2 or pmix
        (JOBSET | SLURM | {"WORLD_SIZE": "5"}, "slurm"),  # Slurm in pods
        (without(JOBSET, "WORLD_SIZE") | OPEN_MPI, "mpi"),
    ],
)
def test_whoever_started_it_last_wins(env, kind):
    assert detect(env).kind == kind


def test_torchrun_is_asked_after_none_of_the_engines_errors():
    broken = SLURM | {"SLURM_STEP_NODELIST": "gpu[", "TORCHELASTIC_RUN_ID": "x"}
    assert detect(TORCHRUN | broken).kind == "torchrun"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (SLURM | {"WORLD_SIZE": "8"}, "^WORLD_SIZE='8' contradicts Slurm job 4711, step 0, which says 5: unset RANK"),
        (SLURM | TORCHRUN | {"RANK": "0", "WORLD_SIZE": "5"}, "^RANK='0' contradicts Slurm job 4711, step 0"),
        (OPEN_MPI | {"RANK": "0"}, "^RANK='0' contradicts Open MPI's mpirun"),
        (SLURM | {"SLURM_PROCID": "5"}, "^SLURM_PROCID=5 must be below SLURM_STEP_NUM_TASKS=5"),
        (SLURM | {"SLURM_LOCALID": "2"}, "^SLURM_LOCALID=2 must be below SLURM_TASKS_PER_NODE=2"),
        (SLURM | {"SLURM_NODEID": "3"}, "^SLURM_NODEID=3, .* left over from another step"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5"}, "contradict each other"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[8-"}, r"^'gpu\[8-' is not a list of hosts"),
        (without(SLURM, "SLURM_PROCID"), "^SLURM_PROCID is not set although other variables of srun are"),
        (SLURM | {"SLURM_PROCID": "0"}, "^rank 0 of Slurm .* runs on gpu09, but the others look for it on gpu08"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "^OMPI_COMM_WORLD_RANK=2 must be below OMPI_COMM_WORLD_SIZE=2"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "^OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        ({"PMIX_RANK": "1"}, "^PMIX_RANK='1' is set, but neither"),
        (SLURM | {"PACELINE_SIZE": "5"}, "^PACELINE_RENDEZVOUS is not set although"),  # left over from a member
        ({"PACELINE_TOKEN": "t"}, "^PACELINE_RANK is not set although"),
        (JOBSET | {"JOB_COMPLETION_INDEX": "4"}, "^JOB_COMPLETION_INDEX=4 must be below WORLD_SIZE=4"),
        (without(JOBSET, "JOBSET_NAME"), "^MASTER_ADDR is not set"),
        (SLURM | {"MASTER_ADDR": "n", "MASTER_PORT": "x"}, "^MASTER_PORT='x' must be a whole number"),
    ],
)
def test_contradictions_are_explained(env, message):
    with pytest.raises(ConfigError, match=message):
        detect(env)


@pytest.mark.parametrize(
    "shell",
    [
        without(SLURM, "SLURM_STEP_ID"),  # the batch script
        SLURM | {"SLURM_PTY_PORT": "1"},  # srun --pty bash
    ],
)
def test_a_shell_in_an_allocation_is_no_task(shell):
    place = detect(shell)
    assert (place.kind, place.size) == ("alone", 1)
    assert place.note.endswith("has 5 tasks, but not as one of them: for all of them, start it with srun")
    assert detect(shell | {"SLURM_NTASKS": "1"}).note == ""


def test_a_launcher_among_many_is_noticed():
    assert crowd(SLURM) == "rank 3 of 5 of Slurm job 4711, step 0"
    assert crowd({}) == crowd(without(SLURM, "SLURM_STEP_ID")) == ""
    alone = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "gpu09"}
    assert crowd(SLURM | alone | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) == ""
    assert crowd(SLURM | {"SLURM_NODEID": "9"}) == ""  # contradicts the rest: for members to complain about


# ---- lists of hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,m", ["n1", "m"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1,3-4],m[2]", ["n1", "n3", "n4", "m2"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1-2]-ib.site", ["n1-ib.site", "n2-ib.site"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert hostlist.expand(text) == hosts


@pytest.mark.parametrize("text", ["", "n[", "n]", "n[]", "n[3-1]", "n[a-b]", "n1,,n2", "n[1-9999999]", "n[[1]]", "a b"])
def test_lists_of_hosts_that_are_none(text):
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        hostlist.expand(text)


@pytest.mark.parametrize("text", ["", "x", "2(x", "2x3", "2(x99999999)"])
def test_tasks_that_are_none(text):
    with pytest.raises(ConfigError, match="does not say how many tasks"):
        hostlist.tasks(text)
