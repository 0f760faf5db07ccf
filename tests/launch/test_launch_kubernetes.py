"""`paceline run --on kubernetes`: manifests that fit the published schemas, and pods that do what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch import held, plan, record
from paceline.launch.engines import Shown, local
from paceline.launch.engines import manifests as told
from paceline.launch.engines.kubernetes import Engine
from paceline.launch.engines.manifests import Pods
from paceline.launch.spec import Elastic, JobSpec

ROOT = Path(__file__).parents[2]
SCHEMAS = Path(__file__).with_name("schemas")
TOKEN = "0123456789abcdef" * 4


def schema(manifest: dict[str, Any]) -> dict[str, Any]:
    files = {"JobSet": "jobset-v1alpha2", "TrainJob": "trainjob-v1alpha1"}
    found = json.loads((SCHEMAS / f"{files.get(manifest['kind'], 'core-v1')}.json").read_text())
    return found if manifest["kind"] in files else found[manifest["kind"]]


def faults(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """What does not fit; unlike an API server, which drops them, names that the schema does not know."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) and not isinstance(value, bool) else [f"{path}: {value!r}"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    kind = kinds[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{path}: {value!r} is not of type {schema['type']}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} is not one of {schema['enum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{path}: {value!r} does not match {schema['pattern']}")
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6):
        found.append(f"{path}: the length of {value!r}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{path}: {value} is too small or too large")
    if isinstance(value, list):
        for i, each in enumerate(value):
            found += faults(each, schema["items"], f"{path}[{i}]")
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        found += [f"{path}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, each in value.items():
            if name in known:
                found += faults(each, known[name], f"{path}.{name}")
            elif rest:
                found += faults(each, rest, f"{path}.{name}")
            elif known:
                found.append(f"{path}: {name} is not known")
    return found


def job(**more: Any) -> JobSpec:
    values = {"script": "train.py", "num_members": 4, "elastic": Elastic(least=2, most=4, listen="here", slots=0)}
    return JobSpec(**(values | {"settings": Settings(name="digits")} | more))


def pods(**more: Any) -> Pods:
    return Pods(**({"run": "digits", "image": "registry/train:1", "storage": "10Gi"} | more))


# ---- what is written


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("per_pod", [1, 3, 4])
@pytest.mark.parametrize("more", [{}, {"claim": "c", "namespace": "ml", "gpus": 2}], ids=["least", "most"])
def test_manifests_fit_the_schemas(kind, per_pod, more):
    made = told.manifests(job(env={"A": "b"}), pods(kind=kind, per_pod=per_pod, **more), TOKEN)
    kinds = ["Secret", *([] if more else ["PersistentVolumeClaim"]), "JobSet" if kind == "jobset" else "TrainJob"]
    assert [manifest["kind"] for manifest in made] == kinds
    for manifest in made:
        assert faults(manifest, schema(manifest)) == []
        assert manifest["metadata"].get("namespace") == more.get("namespace")


def test_the_schemas_notice_mistakes():
    (_, _, made) = told.manifests(job(), pods(), TOKEN)
    container = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["comand"] = container.pop("command")
    made["spec"]["startupPolicy"]["startupPolicyOrder"] = "Sometimes"
    made["spec"]["replicatedJobs"][1]["replicas"] = "1"
    del made["spec"]["replicatedJobs"][1]["name"]
    found = faults(made, schema(made))
    assert len(found) == 4, found
    assert any("comand is not known" in fault for fault in found)


def containers(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs = made[-1]["spec"]["replicatedJobs"]
    return [each["template"]["spec"]["template"]["spec"]["containers"][0] for each in jobs]


def test_the_token_is_in_the_secret_alone():
    made = told.manifests(job(), pods(), TOKEN)
    assert made[0]["stringData"] == {"token": TOKEN}
    assert TOKEN not in json.dumps(made[1:])
    for container in containers(made):
        (entry,) = (e for e in container["env"] if e["name"] == "PACELINE_TOKEN")
        assert entry["valueFrom"]["secretKeyRef"] == {"name": "digits", "key": "token"}


def test_pods_are_as_many_as_members_need():
    for per_pod, others in ((1, 3), (2, 1), (3, 1)):
        made = told.manifests(job(), pods(per_pod=per_pod), TOKEN)
        first, rest = (each["template"]["spec"] for each in made[-1]["spec"]["replicatedJobs"])
        assert (first["completions"], rest["completions"], rest["parallelism"]) == (1, others, others)
    assert len(told.manifests(job(), pods(per_pod=4), TOKEN)[-1]["spec"]["replicatedJobs"]) == 1


def test_others_join_the_first_by_the_name_of_its_headless_service():
    made = told.manifests(job(), pods(), TOKEN)
    network = made[-1]["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "subdomain": "digits", "publishNotReadyAddresses": True}
    first, other = (container["command"] for container in containers(made))
    assert first[first.index("--listen") + 1] == "$(POD_IP)"
    assert other[other.index("--join") + 1] == "digits-first-0-0.digits:29400"


def test_what_was_typed_goes_to_the_first_pod():
    settings = Settings().with_(name="digits", seed=3, codec="sign", fresh=True, wait_limit_s=9.000000001)
    settings = settings.pin("name", "seed", "codec", "fresh", "wait_limit_s")
    first = told.first(job(settings=settings, threads=2, labels=("gpu",), args=("--lr", "1")), pods(), "10.1.1.1")
    line = shlex.join(first)
    assert line.startswith("python -m paceline run -n 2:4 --listen 10.1.1.1 --port 29400 --slots 1 --name digits ")
    assert " --threads 2 --label gpu --codec sign --fresh --seed 3 --wait-limit-s 9.000000001 train.py --lr 1" in line


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_kubernetes_expands_nothing_of_the_users(kind):
    hard = ("$(HOME)", "it's", "a$$b", "$$(HOME)", "$", "$$$", "a$(b", "$x$(POD_IP)")
    made = told.manifests(job(args=hard, env={"A": "$(B)$$"}), pods(kind=kind), TOKEN)
    container = made[-1]["spec"]["trainer"] if kind == "trainjob" else containers(made)[0]
    words, env = as_pod(container, "first", made[0]["stringData"], Path("/f"), 1)
    if kind == "trainjob":
        words = shlex.split(words[-1].partition("exec ")[2].partition("; fi;")[0])
    assert words[-len(hard) :] == list(hard)
    assert env["A"] == "$(B)$$"


@pytest.mark.parametrize(
    ("run", "name"),
    [("digits", "digits"), ("My_Run.1", "my-run-1-"), ("7up", "run-7up-"), ("x" * 70, "x" * 31 + "-"), ("_", "run-")],
)
def test_names_that_kubernetes_allows(run, name):
    made = pods(run=run).name
    assert made == name if run == name else re.fullmatch(f"{name}[0-9a-f]{{8}}", made)
    assert len(made) <= 40


def test_unlike_runs_have_unlike_names():
    runs = ["my-run", "My-Run", "my_run", "my.run", "x" * 50 + "1", "x" * 50 + "2", "7up", "run-7up"]
    assert len({pods(run=run).name for run in runs}) == len(runs)


def test_yaml_says_the_same():
    yaml = pytest.importorskip("yaml", reason="no PyYAML to read it back with")
    for kind in ("jobset", "trainjob"):
        made = told.manifests(job(args=("a: b", "", "#", "ä", "- x")), pods(kind=kind), TOKEN)
        assert list(yaml.safe_load_all(told.text(made))) == made


# ---- the command


def paceline(tmp_path: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    env = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)


RUN = ("run", "-n", "2:4", "--on", "kubernetes", "--image", "i", "--claim", "c", "--name", "big")


def test_a_dry_run_prints_everything_but_the_token(tmp_path):
    done = paceline(tmp_path, *RUN, "--dry-run", "train.py")
    assert done.returncode == 0, done.stderr
    assert 'token: "<token>"' in done.stdout
    assert list(tmp_path.iterdir()) == []
    where = pods(run="big", image="i", claim="c", submission="<submission>")
    shown = told.text(told.manifests(job(settings=Settings(name="big")), where, TOKEN))
    assert done.stdout.strip() == shown.replace(TOKEN, "<token>").strip()


def test_manifests_are_printed_or_written_for_their_owner(tmp_path):
    done = paceline(tmp_path, *RUN, "train.py")
    assert done.returncode == 0, done.stderr
    token = re.search(r'token: "([0-9a-f]{64})"', done.stdout)
    assert token
    assert done.stderr == "paceline: to start it, pipe this to: kubectl apply --server-side -f -\n"
    done = paceline(tmp_path, *RUN, "--output", "big.yaml", "train.py")
    assert "kubectl apply --server-side -f big.yaml" in done.stderr
    assert done.stdout == ""
    assert stat.S_IMODE((tmp_path / "big.yaml").stat().st_mode) == 0o600
    assert token[1] not in (tmp_path / "big.yaml").read_text()  # each run has its own


KUBECTL = """#!/bin/sh
echo "$@" >> "{log}"
case "$1" in
  apply)
    cat > "{log}.applied"
    echo "big StartupPolicyCompleted" > "{log}.state"
    echo "jobset/big serverside-applied";;
  get) [ ! -e "{log}.state" ] || cat "{log}.state";;
  logs) echo "[pod/big-first-0-0/paceline] [0] hello";;
  exec) echo "it has 3 members";;
  delete) rm -f "{log}.state"; echo 'jobset.jobset.x-k8s.io "big" deleted';;
esac
"""


@pytest.fixture
def cluster(tmp_path):
    """There is no cluster here; a script stands for kubectl. `log` has its calls, `log.state` how the JobSet stands."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/kubectl"
    fake.write_text(KUBECTL.format(log=tmp_path / "log"))
    fake.chmod(0o755)
    return str(tmp_path / "bin")


def test_a_run_that_was_applied_is_asked_about_and_stopped(cluster, tmp_path):
    path = cluster
    done = paceline(tmp_path, *RUN, "--namespace", "ml", "--apply", "train.py", path=path)
    assert done.returncode == 0, done.stderr
    assert "big serverside-applied" in done.stderr
    assert 'kind: "JobSet"' in (tmp_path / "log.applied").read_text()
    found = held.read(tmp_path / "runs/big")
    assert found is not None
    assert (found.engine, found.id) == ("kubernetes", "jobset.jobset.x-k8s.io/ml/big")
    assert paceline(tmp_path, "status", "big", path=path).stdout == "big: jobset big: running\nit has 3 members\n"
    assert "hello" in paceline(tmp_path, "logs", "big", "--lines", "5", path=path).stdout
    assert "hello" in paceline(tmp_path, "logs", "big", "--follow", path=path).stdout  # and ends when kubectl does
    assert "it has 3 members" in paceline(tmp_path, "scale", "big", "3", path=path).stdout
    stopped = paceline(tmp_path, "stop", "big", path=path)
    assert "deleted" in stopped.stdout + stopped.stderr
    calls = (tmp_path / "log").read_text().splitlines()
    assert calls[0].startswith("get jobset.jobset.x-k8s.io big -n ml --ignore-not-found -o jsonpath=")
    assert calls[1] == "apply --server-side -f -"
    logs = "logs -l jobset.sigs.k8s.io/jobset-name=big -n ml --prefix --tail"
    assert [call for call in calls if "logs" in call] == [f"{logs} 5", f"{logs} -1 -f --max-log-requests 1000"]
    where = "exec -n ml job/big-first-0 -- python -m paceline"
    assert f"{where} status --root /paceline/runs big" in calls
    assert f"{where} scale --root /paceline/runs big 3" in calls
    assert calls[-1] == "delete jobset.jobset.x-k8s.io/big secret/big --ignore-not-found -n ml"


def test_a_name_that_runs_is_refused_and_one_that_ended_goes_on(cluster, tmp_path):
    log, state = tmp_path / "log", tmp_path / "log.state"
    state.write_text("big StartupPolicyCompleted")
    done = paceline(tmp_path, *RUN, "--apply", "train.py", path=cluster)
    assert done.returncode == 2
    assert "run 'big' is jobset big already, which is running: paceline stop big first, or give another" in done.stderr
    assert not (tmp_path / "log.applied").exists()
    state.write_text("big StartupPolicyCompleted Failed")
    log.unlink()
    done = paceline(tmp_path, *RUN, "--apply", "train.py", path=cluster)
    assert done.returncode == 0, done.stderr
    assert "jobset big, which had failed, goes on" in done.stderr
    assert [call.split()[0] for call in log.read_text().splitlines()] == ["get", "delete", "apply"]


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ("", "gone"),
        ("big", "not finished"),
        ("big StartupPolicyInProgress", "starting"),
        ("big StartupPolicyCompleted", "running"),
        ("big Suspended", "suspended"),
        ("big StartupPolicyCompleted Completed", "completed"),
        ("big Complete", "completed"),
        ("big Failed", "failed"),
    ],
)
def test_how_a_jobset_stands(conditions, state, cluster, tmp_path, monkeypatch):
    (tmp_path / "log.state").write_text(conditions)
    monkeypatch.setenv("PATH", f"{cluster}:{os.environ['PATH']}")
    job = held.Held(engine="kubernetes", id="jobset.jobset.x-k8s.io//big")
    assert Engine().state(job) == f"jobset big: {state}"
    assert Engine().over(job) == (state in ("gone", "completed", "failed"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_kubectl_too(number, tmp_path):
    fake = tmp_path / "kubectl"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid.part\nmv {tmp_path}/pid.part {tmp_path}/pid\nexec sleep 50\n")
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "paceline", *RUN, "--apply", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    seen = Path("/proc", (tmp_path / "pid").read_text().strip(), "cmdline")
    while seen.exists() and seen.read_bytes() and time.monotonic() < deadline:  # an empty one is that of a zombie
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    done = paceline(tmp_path, *RUN, "--output", "no/big.yaml", "train.py")
    assert done.returncode == 2
    assert "paceline: error: --output 'no/big.yaml' cannot be written: No such file" in done.stderr


def test_a_kubectl_that_fails_says_why(tmp_path):
    fake = tmp_path / "kubectl"
    log = "E1118 23:04:01.009214   26376 memcache.go:265] Unhandled Error"  # said several times over
    fake.write_text(f"#!/bin/sh\necho '{log}\n{log}\nerror: no matches for kind \"JobSet\"' >&2\nexit 1\n")
    fake.chmod(0o755)
    done = paceline(tmp_path, *RUN, "--apply", "train.py", path=str(tmp_path))
    assert done.returncode == 2
    assert "paceline: error: kubectl get failed: error: no matches for kind" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": ""}, "which image"),
        ({"claim": "", "storage": ""}, "where do checkpoints go"),
        ({"claim": "c", "storage": "1Gi"}, "give one of them"),
        ({"kind": "jobsett"}, "did you mean 'jobset'"),
        ({"per_pod": 0}, "at least one member"),
        ({"namespace": "My_Space"}, "^--namespace 'My_Space': Kubernetes allows"),
        ({"claim": "a b"}, "^--claim 'a b'"),
        ({"runtime": 'x"; y'}, "^--runtime"),
        ({"claim": "", "storage": "ten"}, "^--storage 'ten': give a size"),
    ],
)
def test_what_is_missing_is_said(options, message):
    plain = job(elastic=Elastic(least=2, most=4))
    with pytest.raises(ConfigError, match=message):
        Engine(**({"image": "i", "claim": "c"} | options)).prepare(plain)


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cpu", 4, "^--gpus 4 with --device cpu: pods would hold GPUs that no member uses"),
        ("cuda", 0, "^--device cuda: pods have no GPU without --gpus; give --gpus 2"),
        ("cuda:2", 2, "^--device cuda:2: a pod with --gpus 2 has cuda:0 to cuda:1"),
    ],
)
def test_gpus_and_a_device_that_contradict_each_other(device, gpus, message):
    asked = job(elastic=Elastic(least=2, most=4), settings=Settings(name="digits", device=device))
    with pytest.raises(ConfigError, match=message):
        Engine(image="i", claim="c", per_pod=2, gpus=gpus).prepare(asked)


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--per-pod", "4", "--gpus", "2"), "--gpus 2: the 4 members of a pod share them; --gpus 4 is one for each"),
        (("--gpus", "4"), "--gpus 4: a member computes on one of them, and a pod has 1 member (--per-pod), so 3 of"),
        (("--per-pod", "6"), "--per-pod 6: the run has 4 members at most, so there is one pod, with these"),
        (("--per-pod", "2", "--gpus", "2", "--device", "cuda"), ""),
        (("--root", "/data/runs"), "--root /data/runs: here alone, for the note by which paceline status and others"),
    ],
)
def test_what_is_hardly_meant_is_told(words, warning, tmp_path):
    """In a dry run as a comment, else as a line; what is printed stays as it is."""
    (tmp_path / "train.py").touch()
    dry, real = (paceline(tmp_path, *RUN, *more, *words, "train.py") for more in (("--dry-run",), ()))
    assert dry.returncode == real.returncode == 0, dry.stderr + real.stderr
    assert dry.stdout.startswith(f"# warning: {warning}" if warning else "---\n")
    assert f"paceline: warning: {warning}" in real.stderr if warning else "warning" not in real.stderr
    assert real.stdout.startswith("---\n")
    assert "/data/runs" not in real.stdout
    assert '"/paceline/runs"' in real.stdout


@pytest.mark.parametrize(
    ("more", "option"),
    [({"hosts": "a:1"}, "--hosts"), ({"listen": "10.0.0.1"}, "--listen"), ({"slots": 2, "listen": "x"}, "--listen")],
)
def test_pods_are_the_hosts(more, option):
    with pytest.raises(ConfigError, match=f"^{option} does not go with --on kubernetes"):
        Engine(image="i", claim="c").prepare(job(elastic=Elastic(least=2, most=4, **more)))


def test_a_short_token_is_refused_by_who_listens(tmp_path):
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "paceline", "run", "-n", "1:2", "--listen", "127.0.0.1", "--dry-run", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PACELINE_TOKEN": "short"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "PACELINE_TOKEN has 5 characters" in done.stderr


# ---- what runs in the pods


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def expanded(word: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of a word: of $$ a $, of $(NAME) a value, if there is one; all else stays."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else env.get(found[2], found[0]), word)


def test_a_trainjob_that_numbers_nobody_says_so():
    made = told.manifests(job(), pods(kind="trainjob", runtime="plain"), TOKEN)
    words, env = as_pod(made[-1]["spec"]["trainer"], "first", made[0]["stringData"], Path("/f"), 1)
    done = subprocess.run(words, env={"PATH": os.environ["PATH"]} | env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "PET_NODE_RANK: is not set: runtime plain has no mlPolicy torch, see --runtime" in done.stderr


def as_pod(
    container: dict[str, Any], name: str, secret: dict[str, str], files: Path, port: int
) -> tuple[list[str], dict[str, str]]:
    """A container's command and environment as a kubelet would make them, for a pod that has this host's network."""
    fields = {"status.podIP": "127.0.0.1", "metadata.name": name}
    env = {}
    for entry in container["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            env[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            env[entry["name"]] = secret[source["secretKeyRef"]["key"]]
        else:
            env[entry["name"]] = expanded(entry["value"], env)
    words = []
    for word in container["command"]:
        word = expanded(word, env)
        word = word.replace("digits-first-0-0.digits", "localhost").replace(told.FILES, str(files))
        words.append(re.sub(rf"\b{told.PORT}\b", str(port), word))
    return words, env


def test_a_submission_starts_over_once(tmp_path):
    old = tmp_path / "digits/checkpoints/step-7"
    spec = job(settings=Settings(name="digits", root=str(tmp_path), fresh=True).pin("fresh"))
    found = []
    for submission in ("one", "one", "two", "", ""):
        old.mkdir(parents=True, exist_ok=True)
        with record.Record(spec.settings, "train.py", 1, 1, submission) as kept:
            found.append((plan.told(spec, kept).fresh, old.exists()))
    once, never_told = (True, False), (True, True)  # without one it is the members who drop them
    assert found == [once, (False, True), once, never_told, never_told]


def test_a_lock_of_a_launcher_that_is_gone_is_waited_for(tmp_path):
    """Its host is gone, and the server of the disk finds out later."""
    said: list[str] = []
    lock = record.Record(Settings(name="digits", root=str(tmp_path)), "train.py", 1)
    threading.Timer(0.5, lock.__exit__, (None, None, None)).start()
    record.await_end(lock.dir, 60.0, said.append)
    assert not record.is_running(lock.dir)
    assert len(said) == 1
    assert "waiting for up to 60 s" in said[0]


def test_the_first_pod_of_a_trainjob_is_no_crowd(monkeypatch, tmp_path):
    for name, value in {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NODE_RANK": "0", "PET_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PET_MASTER_ADDR", "first")
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    monkeypatch.setattr(local.Local, "start", lambda self, spec: None)
    for listen, warned in (("127.0.0.1", False), ("", True)):
        said: list[str] = []
        shown = Shown(show=None, say=said.append)
        local.Engine().start(job(elastic=Elastic(least=1, most=4, listen=listen)), shown)
        assert any("each of them starts a run of its own" in line for line in said) == warned


def test_an_agent_waits_for_a_name_that_is_not_known_yet(tmp_path):
    env = os.environ | {"PACELINE_TOKEN": TOKEN}
    command = [sys.executable, "-m", "paceline", "agent", "--join", "pod.invalid:29400"]
    took = []
    for more in ((), ("--limit-s", "4")):
        began = time.monotonic()
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, timeout=60)
        took.append(time.monotonic() - began)
        assert done.returncode == 2
        assert "the host name is not known" in done.stderr
    assert "joining the run at pod.invalid:29400, for up to 4 s" in done.stderr
    assert took[1] > 4.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_fresh_is_obeyed_once_for_each_submission(kind, tmp_path):
    """A JobSet starts the same command again, to go on from the checkpoints that the first start has written."""
    script = """
    from pathlib import Path
    import paceline
    run = paceline.join()
    old = Path(run.dir, "checkpoints/step-7")
    print("there" if old.exists() else "gone", run.settings.fresh)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    (tmp_path / "runs/digits/checkpoints/step-7").mkdir(parents=True)
    alone = {"num_members": 1, "elastic": Elastic(least=1, most=1, listen="x", slots=0)}
    settings = Settings(name="digits", fresh=True).pin("fresh")
    spec = job(script=str(tmp_path / "train.py"), settings=settings, **alone)
    said = []
    for submission in ("one", "one", "two"):
        made = told.manifests(spec, pods(kind=kind, submission=submission), TOKEN)
        container = made[-1]["spec"]["trainer"] if kind == "trainjob" else containers(made)[0]
        words, env = as_pod(container, "first", made[0]["stringData"], tmp_path, free_port())
        more = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PET_NODE_RANK": "0"}
        done = subprocess.run(words, env=os.environ | env | more, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split()[-2:])
        (tmp_path / "runs/digits/checkpoints/step-7").mkdir(parents=True, exist_ok=True)
    assert said == [["gone", "True"], ["there", "False"], ["gone", "True"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_pods_train_the_digits_and_one_may_be_lost(kind, tmp_path):
    """The commands of the manifests, as processes; the pod that is not the first is killed and started again."""
    pytest.importorskip("sklearn")
    script = str(ROOT / "examples/digits.py")
    spec = job(script=script, num_members=2, elastic=Elastic(least=1, most=2, listen="x", slots=0), args=())
    made = told.manifests(spec, pods(kind=kind), TOKEN)
    if kind == "jobset":
        templates = containers(made)
    else:
        templates = [made[-1]["spec"]["trainer"]] * 2
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    running: list[subprocess.Popen[str]] = []

    def start(number: int, name: str) -> subprocess.Popen[str]:
        words, env = as_pod(templates[number], name, made[0]["stringData"], tmp_path, port)
        if kind == "trainjob":  # what the runtime adds
            env |= {"PET_NODE_RANK": str(number), "PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"}
        output = (tmp_path / f"{name}.txt").open("w")
        with output:
            running.append(
                subprocess.Popen(
                    words,
                    env=inherited | env | {"PATH": path, "OMP_NUM_THREADS": "1"},
                    cwd=tmp_path,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return running[-1]

    def wait_for(name: str, words: str, limit_s: float = 100.0) -> str:
        deadline = time.monotonic() + limit_s
        while words not in (said := (tmp_path / f"{name}.txt").read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        return said

    try:
        first = start(0, "first")
        wait_for("first", "other hosts join with")
        lost = start(1, "other")
        wait_for("first", "epoch 2/15")
        lost.kill()
        start(1, "again")
        assert first.wait(timeout=150) == 0, (tmp_path / "first.txt").read_text()
        said = (tmp_path / "first.txt").read_text()
    finally:
        for process in running:
            process.kill()
            process.wait()
    accuracy = re.findall(r"test accuracy: ([0-9.]+)%", said + (tmp_path / "other.txt").read_text())
    accuracy = accuracy or re.findall(r"test accuracy: ([0-9.]+)%", (tmp_path / "again.txt").read_text())
    assert len(accuracy) == 1, said
    assert float(accuracy[0]) >= 97.0
    assert "member 1 was not heard: its host other was silent for 3 s; the others go on; it is started again" in said
    assert "host again has joined, with 1 slot" in said
    assert (tmp_path / "runs/digits/report.html").exists()
