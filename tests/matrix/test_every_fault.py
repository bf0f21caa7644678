"""No row of the matrix is without a test, and docs/faults.md lists them."""

from __future__ import annotations

from scripts.faults_reference import FAULTS, faults, render
from tests.support import REPOSITORY


def test_every_fault_has_a_test_and_a_sentence() -> None:
    found = faults()
    assert sorted(found) == list(FAULTS)
    assert [number for number, fault in found.items() if not fault.sentence or not fault.tests] == []


def test_the_page_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "faults.md").read_text() == render(), "run scripts/docs"
