"""Prints docs/faults.md: every fault of the matrix, from the first lines of its tests. Run it by scripts/docs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

MATRIX = Path(__file__).resolve().parent.parent / "tests" / "matrix"
FAULTS = range(1, 28)
HEAD = """\
# What a group survives

<!-- Written by scripts/docs from tests/matrix; change it there. -->

Each fault is made to happen to a real supervisor with real processes, in every case that matters: what a process does
just then, in which state it is, forked or exec'ed. After every one nothing may be left: no process that the group has
made, no socket, no lock; the exit code is the one that belongs to it, the log holds [declared events](events.md) alone,
and the supervisor holds no more descriptors and threads than before. The tests of fault *n* are called `test_f`*n*`_…`;
one that needs what a machine lacks is skipped, and names it.

| Fault | What happens | Tests |
|---|---|---|
"""


@dataclass
class Fault:
    """One row: what is said of it, and the files that hold its tests."""

    sentence: str = ""
    files: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)


def faults() -> dict[int, Fault]:
    """Return every fault that a test names, by its number."""
    found: dict[int, Fault] = {}
    for file in sorted(MATRIX.glob("test_f*.py")):
        tree = ast.parse(file.read_text())
        text = ast.get_docstring(tree) or ""
        said = dict(re.findall(r"^F(\d+): (.+?)(?=^F\d+: |\Z)", text, re.DOTALL | re.MULTILINE))
        for node in tree.body:
            named = re.match(r"test_f(\d+)_", getattr(node, "name", ""))
            if named is None:
                continue
            fault = found.setdefault(int(named[1]), Fault())
            fault.tests.append(node.name)  # type: ignore[attr-defined]
            if file.name not in fault.files:
                fault.files.append(file.name)
                fault.sentence = fault.sentence or " ".join(said.get(named[1], "").split())
    return found


def render() -> str:
    """Return the page."""
    rows = []
    for number, fault in sorted(faults().items()):
        files = ", ".join(f"[{name}](../tests/matrix/{name})" for name in fault.files)
        rows.append(f"| F{number} | {fault.sentence[:1].upper()}{fault.sentence[1:]} | {files} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(render(), end="")
