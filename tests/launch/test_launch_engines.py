"""The seam of engines: what each gives, and what `paceline run --on` makes of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.launch import engines, held
from paceline.launch.spec import JobSpec


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", engines.ENGINES)
def test_each_engine_keeps_the_contract(name: str) -> None:
    made = engines.make(name, {})
    fields = {field.name: field for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    assert {option.field for option in made.OPTIONS} <= set(fields)
    assert all(field.default is not dataclasses.MISSING for field in fields.values())
    for method in ("prepare", "preview", "check", "start"):
        assert callable(getattr(made, method))
    assert isinstance(made.spreads, bool)
    assert not (made.spreads and made.stays)


@pytest.mark.parametrize("name", engines.ENGINES)
def test_an_engine_is_imported_without_torch_and_what_it_drives(name: str) -> None:
    heavy = "torch", "numpy", "ray", "submitit", "kubernetes", "mpi4py"
    code = f"import sys; from paceline.launch import engines; engines.make({name!r}, {{}})"
    code += f"; sys.exit(' '.join(set(sys.modules) & set({heavy!r})) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_two_engines_mean_different_things_by_one_option() -> None:
    seen: dict[str, engines.Option] = {}
    for name in engines.ENGINES:
        for option in engines.options(name):
            before = seen.setdefault(option.name, option)
            assert bool(before.metavar) == bool(option.metavar), option.name


def test_an_unknown_engine_is_named_with_the_nearest(tmp_path: Path) -> None:
    done = run("run", "-n", "2", "--on", "lokal", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "--on 'lokal' is not an engine: did you mean 'local'?" in done.stderr
    done = run("run", "-n", "2", "--on", "", "--dry-run", "train.py", cwd=tmp_path)  # "$ENGINE", which is not set
    assert (done.returncode, "--on '' is not an engine: known: 'kubernetes', 'local'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("--on", "slrum", "--partition", "main", "train.py"),
        ("--partition=main", "--on=slrum", "train.py"),
        ("recipe.toml",),
        ("recipe.toml", "--set", "partition=main"),
    ],
)
def test_an_unknown_engine_is_told_before_its_options(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('script = "train.py"\nmembers = 2\npartition = "main"\non = "slrum"\n')
    done = run("run", "-n", "2", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "paceline: error: --on 'slrum' is not an engine: did you mean 'slurm'?\n"


def test_a_key_of_another_engine_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('script = "train.py"\nmembers = 2\npartition = "main"\n')
    done = run("run", "recipe.toml", cwd=tmp_path)
    assert "recipe.toml, line 3: unknown key 'partition': it is an option of --on slurm" in done.stderr


@pytest.mark.parametrize("more", [(), ("--strategy", "async"), ("--mesh", "shard=2")])
@pytest.mark.parametrize(
    ("engine", "hosts", "advice"),
    [
        ("mpi", "a:2,b:2", '--mpirun "mpirun --host a:2,b:2", or --hostfile FILE there; over ssh, without MPI, leave'),
        ("mpi", "hosts.txt", '--mpirun "mpirun --host a:4,b:4", or --hostfile FILE there'),
        ("torchrun", "a:2,b:2", "give --nodes, and --dry-run shows what to start on the others; over ssh, without"),
        ("local", "a:2,b:2", "leave --on out, since --hosts alone is --on ssh, or leave --hosts out"),
    ],
)
def test_hosts_for_an_engine_that_takes_none(
    engine: str, hosts: str, advice: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    for members in ("4", "2:4"):
        done = run("run", "-n", members, "--on", engine, "--hosts", hosts, *more, "train.py", cwd=tmp_path)
        assert done.returncode == 2
        assert f"--hosts {hosts} with --on {engine}: " in done.stderr
        assert advice in done.stderr


def test_a_command_of_the_users_does_not_go_with_mpirun(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = run("run", "-n", "2", "--on", "mpi", "--hosts", "a", "--start-on", "rsh {host}", "train.py", cwd=tmp_path)
    assert 'mpirun is told of hosts in its own words: --mpirun "mpirun --host a"' in done.stderr


def test_a_command_of_the_users_goes_with_local(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ("--hosts", "localhost", "--listen", "127.0.0.1", "--start-on", "env H={host}", "--dry-run", "train.py")
    done = run("run", "-n", "1:2", "--on", "local", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_members_that_cannot_come_and_go_are_not_advised_to(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = run("run", "-n", "2", "--on", "mpi", "--slots", "1", "train.py", cwd=tmp_path)
    assert "--slots does not go with --on mpi: mpirun ends all ranks when one is lost" in done.stderr


def test_what_follows_the_script_is_not_an_engine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:])")
    done = run("run", "-n", "1", "train.py", "--on", "mars", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "['--on', 'mars']" in done.stdout


def test_local_is_the_engine_of_a_run_that_names_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    plain, named = (run("run", "-n", "2", *on, "--dry-run", "train.py", cwd=tmp_path) for on in ([], ["--on", "local"]))
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == named.stdout
    assert "# rank 1" in plain.stdout
    assert not (tmp_path / "runs").exists()


def test_who_holds_a_run_is_written_down(tmp_path: Path) -> None:
    assert held.read(tmp_path / "big") is None
    held.write(tmp_path / "big", held.Held(engine="local", id="7"))
    found = held.read(tmp_path / "big")
    assert found == held.Held(engine="local", id="7")
    with pytest.raises(ConfigError, match="submits nothing"):
        engines.queue(found)
    (tmp_path / "big" / held.FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"engine\.json cannot be read"):
        held.read(tmp_path / "big")


def test_preparing_a_run_on_this_host_changes_nothing() -> None:
    spec = JobSpec(script="train.py", num_members=3)
    assert engines.make("local", {}).prepare(spec) is spec


def test_variables_for_members(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['WORD'], os.environ['HOME'])")
    done = run("run", "-n", "1", "--env", "WORD=some thing", "--env", "HOME", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"[0] some thing {Path.home()}" in done.stdout


def test_the_options_of_an_engine_are_in_its_help(tmp_path: Path) -> None:
    plain, own = (run("run", *on, "--help", cwd=tmp_path).stdout for on in ([], ["--on=ssh"]))
    assert "--sync" in own
    assert "--sync" not in plain
    assert "--hosts a:4,b:4|FILE" in plain


def test_a_run_goes_on_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    done = run("run", "-n", "1", "--name", "big", "--detach", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run big goes on without this terminal" in done.stdout
    stopped = run("stop", "big", cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "ended with exit code 143" in stopped.stdout
    assert "stopped" in (tmp_path / "runs" / "big" / "logs" / "launcher.log").read_text()


def test_a_script_that_is_not_there_ends_a_background_run_at_once(tmp_path: Path) -> None:
    done = run("run", "-n", "1", "--detach", "nothing.py", cwd=tmp_path)
    assert (done.returncode, "'nothing.py' does not exist" in done.stderr) == (2, True)
