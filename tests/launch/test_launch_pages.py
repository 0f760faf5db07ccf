"""Commands on the pages of MPI, torchrun and Kubernetes: run as a preview, by another test, or marked as not run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from paceline import cli

ROOT = Path(__file__).parents[2]
PAGES = {  # and what stands in each preview
    "docs/how-to/mpi.md": "mpirun",
    "docs/how-to/torchrun-and-notebooks.md": "torch.distributed.run --standalone",
    "docs/how-to/kubernetes.md": "kind:",
}
ELSEWHERE = {
    "mpirun -n 2 python examples/digits.py",  # test_environment_processes
    "torchrun --nproc-per-node 2 train.py",  # test_cli_commands
}


def lines(page: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in lines(page)])
def test_a_command_does_what_the_page_says(page, line, tmp_path, monkeypatch, capsys):
    if line.endswith("not run by a test") or line in ELSEWHERE:
        return
    words = shlex.split(line, comments=True)
    assert words[:2] == ["paceline", "run"], f"{page}: {line}"
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--dry-run", *words[2:]]) == 0
    shown = capsys.readouterr().out
    assert "train.py" in shown
    assert PAGES[page] in shown
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
