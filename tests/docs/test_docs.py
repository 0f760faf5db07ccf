"""What is written is true: code blocks run, links lead somewhere, commands parse, messages and references match.

Python blocks of one page run one after another in one process, in a directory of their own. The processes are forked
from one that has imported torch, since that import alone takes longer than most pages.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import paceline
from paceline import cli
from paceline.cli import plan as plan_command
from paceline.cli import run as run_command
from paceline.cli import serve as serve_command
from paceline.core.errors import ConfigError
from paceline.core.settings import NAMES, Settings

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
MODULES = sorted(m.name for m in pkgutil.walk_packages(paceline.__path__, "paceline.") if m.name != "paceline.__main__")
LIMIT_S = 170


class Block(NamedTuple):
    language: str  # the words after the fence
    line: int  # of its first line of text, from 1
    text: str


def blocks(page: Path) -> Iterator[Block]:
    language, start, lines = None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            if language is None:
                language, start, lines = line[3:].strip(), number + 1, []
            else:
                yield Block(language, start, "\n".join(lines))
                language = None
        else:
            lines.append(line)
    assert language is None, f"{page}: a code block does not end"


def python_blocks(page: Path) -> list[Block]:
    return [b for b in blocks(page) if b.language == "python"]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUNNING = [page for page in PAGES if python_blocks(page)]

# ---- code blocks

_PAGES_PROGRAM = """
import atexit, contextlib, json, os, sys, time
import torch, torch._dynamo, paceline.train.join, paceline.train.report  # once for all pages
with contextlib.suppress(ImportError):
    import torch.utils.tensorboard

def run(page):
    os.makedirs(page["directory"])
    os.chdir(page["directory"])
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what comes there is not for the page
    sys.modules["__main__"].__file__ = page["name"]
    names = {"__name__": "__main__"}
    for line, text in page["blocks"]:
        exec(compile("\\n" * (line - 1) + text, page["name"], "exec"), names)

for line in sys.stdin:
    page = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(page)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)  # taking torch down takes a second
    limit = time.monotonic() + page["limit_s"]
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < limit:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, 9)
        ended = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(ended[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    """Runs pages, one after another, in processes that need not import torch again."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "RANK", "WORLD_SIZE", "TORCHELASTIC"))}
    with subprocess.Popen(
        [sys.executable, "-c", _PAGES_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        process.stdin.close()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("page", [name_of(page) for page in RUNNING])
def test_the_code_on_a_page_runs(page: str, forker: subprocess.Popen[str], tmp_path: Path) -> None:
    directory = tmp_path / "page"
    texts = [(b.line, b.text) for b in python_blocks(ROOT / page)]
    job = {"name": page, "directory": str(directory), "blocks": texts, "limit_s": LIMIT_S - 30}
    print(json.dumps(job), file=forker.stdin, flush=True)
    assert forker.stdout.readline().strip() == "0", _text(directory / "output.txt")


def test_few_blocks_are_not_run() -> None:
    left_out = [(name_of(page), b.line) for page in PAGES for b in blocks(page) if b.language == "python no-run"]
    assert len(left_out) <= 2, left_out
    kinds = {b.language for page in PAGES for b in blocks(page) if b.language.startswith("python")}
    assert kinds <= {"python", "python no-run", "python inside", "python outside", "python ray"}  # test_launch_ray_page


@pytest.mark.slow
def test_the_code_of_an_outsider_runs_beside_a_run(tmp_path: Path) -> None:
    """Blocks marked inside are the script of a run, those marked outside look into it."""
    page = ROOT / "docs/how-to/look-into-a-run.md"
    for side in ("inside", "outside"):
        texts = [b.text for b in blocks(page) if b.language == f"python {side}"]
        (tmp_path / f"{side}.py").write_text("\n".join(texts))
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--strategy", "async", "--name", "digits"]
    with subprocess.Popen([*command, "inside.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + LIMIT_S / 2
        while not (tmp_path / "runs/digits/desk.json").exists() and time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.1)
        look = [sys.executable, "outside.py"]
        done = subprocess.run(look, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S / 2)
        if done.returncode:
            run.terminate()
        _, told = run.communicate(timeout=LIMIT_S / 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("finished"), done.stdout
    assert run.returncode == 0, told


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_run_learns_from_those_who_ask_as_the_page_says(tmp_path: Path) -> None:
    """The two commands of the page, with the script that is on it; what is outside talks to the server."""
    page = ROOT / "docs/how-to/online-learning.md"
    texts = {side: [b.text for b in blocks(page) if b.language == f"python {side}"] for side in ("inside", "outside")}
    (tmp_path / "train.py").write_text("\n".join(texts["inside"]))
    outside = "\n".join(texts["outside"])
    first, second = (shlex.split(line) for b in blocks(page) for line in b.text.splitlines() if line[:9] == "paceline ")
    python = [sys.executable, "-m"]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(subprocess.Popen([*python, *first], cwd=tmp_path, stderr=subprocess.PIPE, text=True))
        stack.callback(run.terminate)
        _wait_for(lambda: (tmp_path / "runs/shop/desk.json").exists() or run.poll() is not None)
        words = [*python, *second, "--port", "0", "--replicas", "1"]
        server = stack.enter_context(subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
        stack.callback(server.terminate)
        assert server.stderr
        port = next(m[1] for line in server.stderr if (m := re.search(r"answers at http://127.0.0.1:(\d+)", line)))
        (tmp_path / "outside.py").write_text(outside.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
        look = [sys.executable, "outside.py"]
        done = subprocess.run(look, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        assert "'taken': 16" in done.stdout
        _, told = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, told


def _wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["README.md", *(name_of(p) for p in RUNNING if p.parent.name in ("tutorial", "how-to"))]
)
def test_the_code_on_a_page_runs_on_two_members(page: str, tmp_path: Path) -> None:
    if page.endswith("torchrun-and-notebooks.md"):
        pytest.skip("it begins several runs, which only a run of one can")
    script = tmp_path / "page.py"
    script.write_text("\n".join(b.text for b in python_blocks(ROOT / page)))
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--wait-limit-s", "30", script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- links


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [name_of(page) for page in PAGES])
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(here)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (here.parent / path).resolve() if path else here
        assert there.exists(), f"{page} links to {target}"
        assert there.is_relative_to(ROOT), f"{page} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page} links to {target}; there are {sorted(anchors(there))}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)]+)\)", index.read_text())
    }
    assert {page for page in ROOT.glob("docs/**/*.md") if page != index} <= listed


# ---- commands


def commands(word: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("bash", ""):
                lines = [(block.line + i, line) for i, line in enumerate(block.text.splitlines())]
                found += [(f"{name_of(page)}:{n}", line) for n, line in lines if line.startswith(f"{word} ")]
        inline = re.findall(rf"`({word} [^`]+)`", prose(page))
        found += [(name_of(page), line) for line in inline if not re.search(r"…|COMMAND", line)]
    return found


# A form such as `paceline run -n N [options] script.py` is for people.
_FORM = re.compile(r"\[|-n N\b|\bNAME\b")


def once() -> list[tuple[str, str]]:
    """Each command at the first place where it stands: some take seconds."""
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    for where, line in commands("paceline"):
        if not _FORM.search(line):
            first.setdefault(tuple(shlex.split(line, comments=True)), (where, line))
    return list(first.values())


@pytest.mark.parametrize(("where", "line"), once())
def test_paceline_commands_are_known(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_GUEST_TOKEN", "as the page says")
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "run" and "-n" in words:
        run_command._asked(words[1:])
        return
    if words[0] == "run":  # mentioned by name, perhaps with an option
        known = run_command._parser().takes_value
        assert all(word in known for word in words[1:] if word.startswith("-")), f"{where}: {line}"
        return
    if words[:2] == ["plan", "memory"]:  # whose file is the reader's
        plan_command._parser().parse_args(words[2:])
        return
    if words[0] == "serve":  # whose model is the reader's
        known = serve_command._parser().takes_value
        assert all(word in known for word in words[1:] if word.startswith("-")), f"{where}: {line}"
        return
    try:
        code = cli.main(words)
    except SystemExit as end:  # --help
        code = int(end.code or 0)
    told = capsys.readouterr().err
    assert code in (0, 1) or re.search(r"there (are no runs|is no run)", told), f"{where}: {line}: {told}"


def test_a_wrong_command_would_be_noticed() -> None:
    with pytest.raises(ConfigError):
        run_command._parser().split(["-n", "2", "--stategy", "allreduce", "train.py"])


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for where, line in commands("make"):
        assert set(shlex.split(line, comments=True)[1:]) <= targets, f"{where}: {line}"


# ---- references


def cells(page: str) -> list[str]:
    """The first cell of every row of every table, without the heads."""
    rows = [line for line in prose(ROOT / page).splitlines() if line.startswith("| ")]
    return [row.split(" | ")[0].removeprefix("| ") for row in rows]


def test_settings_are_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| `(.+?)` \|", prose(ROOT / "docs/reference/settings.md"), flags=re.M)
    defaults = Settings()
    assert {name: ast.literal_eval(value) for name, value in rows} == {name: getattr(defaults, name) for name in NAMES}


def test_options_are_complete() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    table = page[: page.index("## paceline status")]
    rows = [
        line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")
    ]  # other commands have their own
    documented = {word for cell in rows for word in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", cell)}
    known = {option for option in run_command._parser().takes_value if option not in ("-h", "--help")}
    assert documented - {"-m"} == known
    for name, option in ((f, "--" + f.replace("_", "-")) for f in NAMES):
        default = getattr(Settings(), name)
        if default not in ("", False):
            row = next(line for line in table.splitlines() if line.startswith(f"| `{option} "))
            assert re.search(
                rf"\| `?{re.escape(f'{default:g}' if isinstance(default, float) else str(default))}`? \|$", row
            )


def test_options_of_serve_are_complete() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    described = set(re.findall(r"^\| (`--[^|]*)", page.partition("## paceline serve")[2].partition("\n## ")[0], re.M))
    found = {option for cell in described for option in re.findall(r"--[a-z-]+", cell)}
    assert found == {option for option in serve_command._parser().takes_value if option not in ("-h", "--help")}


def test_the_run_is_complete() -> None:
    text = (ROOT / "docs/reference/run.md").read_text()
    methods = {n: f for n, f in inspect.getmembers(paceline.Run, inspect.isfunction) if not n.startswith("_")}
    observed = {"own_step", "after_step", "cleared", "group_added"}  # the optimizer's, not the user's
    for name, method in methods.items():
        if name in observed:
            continue
        row = re.search(rf"`{name}\((.*?)\)`", text)
        assert row, f"Run.{name} is not in run.md"
        parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
        assert [p.name for p in parameters] == [w.strip(" *").split("=")[0] for w in row[1].split(",") if w], name
        for p in parameters:
            if p.default is not p.empty:
                assert f"{p.name}={p.default!r}".replace("'", '"') in row[1].replace("'", '"'), name


def test_errors_are_complete() -> None:
    text = (ROOT / "docs/reference/run.md").read_text()
    for name in paceline.__all__:
        assert re.search(rf"`paceline\.{name}\b", text) or name in ("Run",), f"paceline.{name} is not in run.md"


def test_events_are_complete() -> None:
    source = "".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    emitted = set(re.findall(r"\bemit\(\s*\"(\w+)\"", source))
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reference/events.md").read_text(), flags=re.M))
    assert emitted == documented


def texts() -> list[str]:
    """Every string of the source, f-strings with … for what differs."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_exist() -> None:
    """The messages in the first column are those of the source; … may stand for anything."""
    known = texts()
    for cell in cells("docs/how-to/when-something-is-wrong.md"):
        for message in re.findall(r"`([^`]+)`", cell):
            pattern = re.compile(".*?".join(re.escape(part) for part in message.split("…")), flags=re.S)
            assert any(pattern.search(text) for text in known), f"no message like {message!r} in the source"


# ---- doctests


@pytest.mark.parametrize("module", MODULES)
def test_doctests(module: str, request: pytest.FixtureRequest) -> None:
    if ".triton_" in module:
        pytest.importorskip("triton")
    loaded = importlib.import_module(module)
    runner = doctest.DocTestRunner(verbose=False)
    output: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(loaded, module):
        if test.examples:
            test.globs["getfixture"] = request.getfixturevalue
            runner.run(test, out=output.append)
    assert not runner.failures, "".join(output)
