"""`bench experts`: every number of ranks and rows is measured, against a copy of its bytes."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.experts import ExchangeCost, exchange_table

pytestmark = pytest.mark.slow


def test_a_row_of_the_table_is_a_number_of_rows() -> None:
    costs = [ExchangeCost(1, 2, 8, 10.04, 20.0, 3.0)]
    assert exchange_table(costs).splitlines()[2:] == ["| 1 | 2 | 8 | 10.0 | 20.0 | 3.0 |"]


def test_the_command_measures_all_that_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["experts", "--ranks", "2", "3", "--rows", "1", "5", "--hidden", "64", "--rounds", "1", "--json"]
    assert main(argv) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(c["num_ranks"], c["num_rows"]) for c in record["experts"]] == [(2, 1), (2, 5), (3, 1), (3, 5)]
    assert all(c["copy_us"] > 0 for c in record["experts"])


def test_hosts_have_as_many_ranks_each(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["experts", "--rows", "1", "--hidden", "64", "--rounds", "1", "--json"]
    assert main([*argv, "--hosts", "1", "2", "--ranks", "2"]) == 0
    printed = capfd.readouterr()
    costs = json.loads(printed.out)["experts"]
    assert [(c["num_hosts"], c["num_ranks"]) for c in costs] == [(1, 2), (2, 2)]
    assert printed.err.count("shares its experts") == 2, "both ends of the connection"
    assert main([*argv, "--hosts", "2", "--ranks", "2", "3"]) == 2
    assert "hosts: expected a divisor of 3 (ranks), got 2" in capfd.readouterr().err
