"""A slice of the random schemas, and that a wrong output is seen."""

from __future__ import annotations

import pytest

from tests.fuzz.guided_sampling import GuidedSampler, Output
from tests.fuzz.json_schemas import fault_of, run
from tests.fuzz.schema_maker import SchemaMaker

pytestmark = pytest.mark.slow

COUNT = 150


def test_outputs_are_valid_or_the_schema_is_refused() -> None:
    report = run(GuidedSampler.of_demo_model(), seed=15, numbers=range(COUNT))
    print(report)
    assert not report.findings, report
    assert report.counts["schemas taken"] + report.counts["schemas refused"] == COUNT
    assert report.counts["schemas taken"] > COUNT / 3
    assert report.counts["schemas refused"] > COUNT / 10
    assert report.counts["outputs valid"] > 10 * report.counts["outputs cut off"]


def test_a_schema_depends_on_its_number_only() -> None:
    assert SchemaMaker(1, 7).make() == SchemaMaker(1, 7).make()
    assert len({str(SchemaMaker(1, number).make()) for number in range(100)}) > 90


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        (Output(b"4", True), ""),
        (Output(b"-", False), ""),
        (Output(b"6", True), "invalid: 6 is greater than the maximum"),
        (Output(b"0.5", True), "invalid: Decimal('0.5') is not of type 'integer'"),
        (Output(b"4 5", True), "no JSON: "),
        (Output(b"\xff", True), "no JSON: "),
        (Output(b"", False, "no token is allowed"), "the grammar stands still: no token"),
    ],
)
def test_a_wrong_output_is_found(output: Output, fault: str) -> None:
    found = fault_of({"type": "integer", "maximum": 5}, output)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)
