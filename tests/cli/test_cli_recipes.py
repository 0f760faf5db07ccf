"""Recipes: a run written down says what the command line would, and is said no to in the same words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.cli import recipes, toml
from paceline.cli import run as run_command
from paceline.cli.flags import size, whole
from paceline.core.errors import ConfigError
from paceline.launch import names
from paceline.launch.typed import LAST_PORT

PARSER = run_command._parser()
TELL = "import json, sys; print('told', json.dumps(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TELL)
    return tmp_path


def resolve(*argv):
    return recipes.resolve(lambda words: run_command._parser(), list(argv))


def write(text, name="big.toml"):
    Path(name).write_text(text)
    return name


def run(*args, limit_s=60):
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", *args], capture_output=True, text=True, timeout=limit_s
    )


def told(done):
    """The arguments that each member had."""
    lines = [line.partition("told ")[2] for line in done.stdout.splitlines() if "told " in line]
    assert lines, done.stdout + done.stderr
    return [json.loads(line) for line in lines]


# ---- a recipe is what would be typed


POOL = (
    *names.STRATEGIES,
    *names.CODECS,
    *names.PRECISIONS,
    *names.TRANSPORTS,
    *names.DEVICES,
    *names.PROGRESS,
    *names.LR_RULES,
    *names.STRAGGLERS,
    *("bounded(staleness=8)", "topk(0.01), back=sign", "cuda:1", "colocated", "shard=2", "a-name", "gpu:0,1", "gpu"),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def values(option):
    """What an option may be in a recipe."""
    if option.parse is None:
        return st.just(True)
    if option.parse is size:
        return st.integers(1, 99) | st.tuples(st.integers(1, 9), st.integers(9, 99)).map(lambda p: f"{p[0]}:{p[1]}")
    kinds, _ = recipes._kinds(option)
    if float in kinds:
        return st.floats(0.1, 1e9)
    if kinds == (int,):
        return st.integers(1, LAST_PORT)
    if option.parse is str:
        return TEXT
    words = []
    for word in POOL:
        with contextlib.suppress(ConfigError):
            option.parse(word)
            words.append(word)
    assert words, f"no word in POOL is one for {option.name}: put one there"
    return st.lists(st.sampled_from(words), min_size=1) if option.repeats else st.sampled_from(words)


def tables():
    what = st.fixed_dictionaries(
        {"script": TEXT.filter(lambda t: t != "-m" and not recipes.is_recipe(t))},
        optional={"args": st.lists(TEXT, min_size=1)},
    ) | st.fixed_dictionaries({"module": TEXT}, optional={"args": st.lists(TEXT, min_size=1)})
    options = st.fixed_dictionaries({}, optional={key: values(option) for key, option in PARSER.keys.items()})
    return st.tuples(what, options).map(lambda pair: pair[0] | pair[1])


@given(tables())
@example({"script": "train.py", "root": "--"})
@settings(deadline=None, max_examples=200)
def test_arguments_and_back(table):
    given, rest, again = recipes.resolve(lambda words: PARSER, recipes.arguments(PARSER, table))
    assert again == table
    assert rest == recipes.started(table)
    assert {key for key in PARSER.keys if getattr(given, key) not in (None, False)} == table.keys() & PARSER.keys.keys()


@given(tables())
@settings(deadline=None, max_examples=100)
def test_written_and_read(table):
    assert tomllib.loads(toml.text(table)) == table
    recipes.check(PARSER, table, lambda key: "here")


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
LEAVES = TEXT | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.lists(TEXT | st.integers())


@given(st.dictionaries(NAMES, LEAVES | st.dictionaries(NAMES, LEAVES, min_size=1), min_size=1))
def test_arguments_in_a_table_are_written_and_read(args):
    assert tomllib.loads(toml.text({"script": "a.py", "args": args})) == {"script": "a.py", "args": args}


def test_every_option_of_a_run_is_a_key():
    options = {name for name in PARSER.takes_value if name.startswith("--")}
    assert options - {option.name for option in PARSER.keys.values()} == {"--help", "--dry-run", "--set", "--again"}


def test_a_file_says_what_flags_do():
    write("""
        script = "train.py"
        args = ["--lr", 0.1, "data"]
        members = "2:4"
        strategy = "allreduce(bucket_mb=8)"
        checkpoint_every_s = 60
        fresh = true
        label = ["gpu:0", "big"]
    """)
    typed = ["-n", "2:4", "--strategy", "allreduce(bucket_mb=8)", "--checkpoint-every-s", "60", "--fresh"]
    typed += ["--label", "gpu:0", "--label", "big", "train.py", "--lr", "0.1", "data"]
    assert resolve("big.toml")[:2] == resolve(*typed)[:2]


def test_arguments_of_the_script_in_a_table():
    write("""
        script = "train.py"
        members = 1
        [args]
        lr = 0.1
        shift = -2
        v = true
        quiet = false
        sizes = [1, 2]
        model.depth = 3
    """)
    words = ["--lr", "0.1", "--shift=-2", "-v", "--sizes", "1", "2", "--model.depth", "3"]
    assert resolve("big.toml")[1] == ["train.py", *words]
    _, rest, table = resolve(
        "big.toml", "--set", "args.model.depth=4", "--set", "args.v=false", "--set", "args.new=y z"
    )
    assert rest == ["train.py", *words[:3], *words[4:-1], "4", "--new", "y z"]
    assert table["args"]["model"] == {"depth": 4}  # kept as a table, so that it can be changed again


def test_a_function_returns_the_same():
    write("def big():\n    return {'script': 'train.py', 'members': 2, 'args': ('a', 1), 'seed': 3}", "recipes.py")
    given, rest, _ = resolve("recipes.py:big", "--set", "seed=4")
    assert (str(given.members), given.seed, rest) == ("2", 4, ["train.py", "a", "1"])


def test_what_is_typed_wins():
    write('script = "train.py"\nargs = ["a"]\nmembers = 2\nseed = 3\nlabel = ["gpu"]\nname = "big"')
    given, rest, table = resolve("--seed", "0", "big.toml", "-n", "4", "--label", "cpu", "--", "b", "-c")
    assert (given.seed, given.members.most, given.label, given.name) == (0, 4, ["cpu"], "big")
    assert rest == ["train.py", "b", "-c"]
    assert table == {
        "script": "train.py",
        "args": ["b", "-c"],
        "members": 4,
        "seed": 0,
        "label": ["cpu"],
        "name": "big",
    }


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("name=2024", "name", "2024"),
        ("members=2:4", "members", size("2:4")),
        ("members=3", "members", size("3")),
        ("servers=2", "servers", "2"),
        ("codec=topk(0.01), back=sign", "codec", "topk(0.01), back=sign"),
        ('codec="sign"', "codec", "sign"),
        ("fresh=false", "fresh", False),
        ("check_finite=true", "check_finite", True),
        ("label=gpu", "label", ["gpu"]),
        ('label=["a", "b"]', "label", ["a", "b"]),
    ],
)
def test_set(change, key, value):
    write('script = "train.py"\nmembers = 2\nfresh = true')
    assert getattr(resolve("big.toml", "--set", change)[0], key) == value


def test_set_changes_words_in_a_list():
    write('script = "train.py"\nmembers = 1\nargs = ["data", "--lr", "0.1", "--size=3"]')
    changes = ["args.lr=0.2", "args.size=4", "args.new=x", "args.fast=true"]
    _, rest, _ = resolve("big.toml", *(word for change in changes for word in ("--set", change)))
    assert rest == ["train.py", "data", "--lr", "0.2", "--size=4", "--new", "x", "--fast"]
    assert resolve("big.toml", "--set", 'args=["z"]')[1] == ["train.py", "z"]


def test_a_recipe_may_decide_which_options_there_are():
    """As an engine does: its options are known once it is named."""

    def make(words):
        parser = run_command._parser()
        assert "--script=train.py" not in words  # it would end the options
        if "--codec=sign" in words:
            parser.option("--bits", parse=whole(1), metavar="N")
        return parser

    write('script = "train.py"\nmembers = 1\ncodec = "sign"\nbits = 3')
    given, _, table = recipes.resolve(make, ["big.toml"])
    assert given.bits == table["bits"] == 3
    assert recipes.resolve(make, ["big.toml", "--bits", "4", "--", "x"])[0].bits == 4
    write('script = "train.py"\nmembers = 1\ncodec = "topk(0.1)"')
    assert recipes.resolve(make, ["big.toml", "--set", "codec=sign", "--set", "bits=4"])[0].bits == 4


def test_what_was_typed_is_kept_and_not_what_it_was_read_as():
    """As of a variable of the environment, whose value may be a secret."""

    def secret(text: str) -> tuple[str, str]:
        return text, "hidden"

    def make(words):
        parser = run_command._parser()
        parser.option("--pair", parse=secret, metavar="NAME")
        parser.option("--pairs", parse=secret, metavar="NAME", action="append")
        return parser

    words = ["-n2", "--pair=a", "--pairs", "b", "--pair", "c", "--pairs=d=e", "train.py", "--pairs", "x"]
    given, _, table = recipes.resolve(make, words)
    assert given.pairs == [("b", "hidden"), ("d=e", "hidden")]
    assert table == {"script": "train.py", "args": ["--pairs", "x"], "members": 2, "pair": "c", "pairs": ["b", "d=e"]}
    assert recipes.resolve(make, recipes.arguments(make([]), table))[2] == table


def test_recipes_on_the_page_are_ones():
    page = Path(__file__).parents[2] / "docs/how-to/recipes.md"
    blocks = re.findall(r"^```toml\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    assert blocks
    for text in blocks:
        run_command._asked([write(text)])


def test_a_recipe_names_an_engine_and_its_options():
    text = 'script = "train.py"\nmembers = 4\non = "ssh"\nhosts = "a:2,b:2"\ninterface = "eth0"\n'
    given, engine, _, recipe = run_command._asked([write(text), "--set", "interface=eth1"])
    assert (given.on, given.hosts) == ("ssh", "a:2,b:2")
    assert engine.interface == recipe["interface"] == "eth1"
    assert run_command._asked([write(text.replace('on = "ssh"\n', ""))])[1] == engine.__class__(interface="eth0")


# ---- what is wrong is said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 3", "big.toml, line 3: unknown key 'sed': did you mean 'seed'?"),
        ("checkpoint-every-s = 3", "line 3: unknown key 'checkpoint-every-s': did you mean 'checkpoint_every_s'?"),
        ("dry_run = true", "unknown key 'dry_run'"),
        ("seed = 'x'", 'big.toml, line 3: seed = "x": expected a whole number'),
        ("seed = 1.5", "seed = 1.5: expected a whole number"),
        ("seed = true", "seed = true: expected a whole number"),
        ("seed = -1", "seed = -1: '-1' is not a whole number of at least 0"),
        ("wait_limit_s = 'long'", 'wait_limit_s = "long": expected a number'),
        ("wait_limit_s = inf", "wait_limit_s = inf: 'inf' is not a number of seconds"),
        ("fresh = 1", "fresh = 1: expected true or false"),
        ("strategy = ['async']", 'strategy = ["async"]: expected a string'),
        ("strategy = 'alreduce'", "line 3: strategy = \"alreduce\": unknown strategy 'alreduce': did you mean 'allr"),
        ("servers = 0", "servers = 0: '0' is not auto, colocated, or a number of servers"),
        ("label = [1]", "label = [1]: expected a list of strings"),
        ("args = 3", "args = 3: expected a list of words, or a table"),
        ("args = [true]", "expected a list of words, or a table"),
        ("args.when = 2024-01-01", "expected a list of words, or a table"),
        ("module = 'x'", "line 3: script and module: a run has one of them"),
        ("seed 3", "big.toml is not TOML: Expected '=' after a key in a key/value pair (at line 3"),
    ],
)
def test_what_is_wrong_in_a_file(text, message):
    write(f'script = "train.py"\nmembers = 2\n{text}')
    with pytest.raises(ConfigError) as caught:
        resolve("big.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bog.toml"], "there is no recipe 'bog.toml': did you mean 'big.toml'?"),
        (["big.toml", "train.py"], "'train.py' is not understood: the script comes from the recipe"),
        (["big.toml", "--sed", "3"], "unknown option '--sed': did you mean '--seed'?"),
        (["big.toml", "--set", "sed=3"], "--set sed=3: unknown key 'sed': did you mean 'seed'?"),
        (["big.toml", "--set", "agrs.lr=3"], "--set agrs.lr=3: unknown key 'agrs': did you mean 'args'?"),
        (["big.toml", "--set", "seed.x=3"], "seed has no parts"),
        (["big.toml", "--set", "seed"], "write KEY=VALUE"),
        (["big.toml", "--set", "seed=x"], '--set seed=x: seed = "x": expected a whole number'),
        (["big.toml", "--set", "seed=3", "--seed", "4"], "--seed is given too"),
        (["big.toml", "--set", "args.lr.x=3"], "args.x is below a value, not a table"),
        (["-n", "2", "--set", "seed=3", "train.py"], "--set seed=3 changes a recipe"),
        (["--again", "big"], "there are no runs in 'runs'"),
        (["own.py:bag"], "own.py has no function 'bag': did you mean 'bad'?"),
        (["own.py:bad"], "own.py:bad fails: KeyError: 'x' ("),
        (["own.py:odd"], "own.py:odd returns a list: expected a dict"),
        (["own.py:number"], "own.py:number is a int, not a function"),
        (["own.py:wrong"], "own.py:wrong: unknown key 'sript': did you mean 'script'?"),
        (["own.py:numbered"], "the key 3: keys of a recipe are strings"),
        (["own.py:empty"], 'own.py:empty: which script? Write script = "train.py"'),
        (["own.py:itself"], "script = 'big.toml' is a recipe itself"),
    ],
)
def test_what_is_wrong_on_the_command_line(words, message):
    write('script = "train.py"\nmembers = 2\nargs.lr = 1')
    write(
        "def bad(): return {}['x']\ndef odd(): return []\nnumber = 3\ndef wrong(): return {'sript': 'train.py'}\n"
        "def numbered(): return {3: 4}\ndef empty(): return {}\ndef itself(): return {'script': 'big.toml'}",
        "own.py",
    )
    with pytest.raises(ConfigError) as caught:
        resolve(*words)
    assert message in str(caught.value)


# ---- with the run


def test_a_run_is_kept_and_repeated(here):
    write('script = "train.py"\nmembers = 2\n[args]\nlr = 0.1')
    assert told(run("big.toml", "--name", "first", "--set", "seed=3")) == [["--lr", "0.1"]] * 2
    kept = tomllib.loads(Path("runs/first/recipe.toml").read_text())
    assert kept == {"script": "train.py", "members": 2, "seed": 3, "name": "first", "args": {"lr": 0.1}}

    assert told(run("--again", "first", "--set", "args.lr=0.2", "-n", "1")) == [["--lr", "0.2"]]
    (second,) = [path for path in Path("runs").iterdir() if path.name != "first"]  # a run of its own
    assert second.name.startswith("train-")
    again = tomllib.loads((second / "recipe.toml").read_text())
    assert again == {"script": "train.py", "members": 1, "seed": 3, "args": {"lr": 0.2}}

    assert told(run("--again", str(second), "--name", "third", "--", "x")) == [["x"]]  # by its directory
    os.chdir(here / "runs")
    elsewhere = run("--root", ".", "--again", "third")
    assert elsewhere.returncode == 2
    assert f"the run was started in {here}" in elsewhere.stderr


def test_a_run_without_a_recipe_is_kept_too():
    done = run("-n", "1", "--name", "typed", "--wait-limit-s", "9", "train.py", "--lr", "0.1", "-x")
    assert told(done) == [["--lr", "0.1", "-x"]]
    assert told(run("--again", "typed", "--set", "args.lr=3")) == [["--lr", "3", "-x"]]


def test_a_run_that_has_no_recipe_is_told():
    told(run("-n", "1", "--name", "old", "train.py"))
    Path("runs/old/recipe.toml").unlink()
    done = run("--again", "old")
    assert done.returncode == 2
    assert "runs/old has no recipe.toml, which `paceline run` keeps there" in done.stderr
    done = run("--again", "olt")
    assert "there is no run 'olt' in 'runs': did you mean 'old'?" in done.stderr


def test_a_dry_run_of_a_recipe_starts_nothing():
    write('script = "train.py"\nmembers = 2\nargs = ["a b"]')
    done = run("big.toml", "--dry-run")
    assert done.returncode == 0
    assert "train.py 'a b'" in done.stdout
    assert not Path("runs").exists()
