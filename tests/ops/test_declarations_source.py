"""What the build reads from the headers of custom_ops/include/fdsd: ops, and fields of structs by their paths."""

from __future__ import annotations

import pathlib

import pytest

from custom_ops.build import BuildError, declarations_source

HEADER = """#pragma once
#include "fdsd/status.h"

namespace fdsd {

enum class Kind : int32_t { kOne = 0, kTwo = 1 };
// A part.
struct Part {
  const void* data;  // [n]
  Kind kind;
};
struct WholeParams {
  int32_t n;  // rows
  struct Output {
    int64_t* y;
  } out;
  Part part;
};
Error Whole(const WholeParams& p);
Error TopPWhole(const TopPWholeParams& p);
Error Other(const WholeParams& p,
            int32_t more);

}  // namespace fdsd
"""


def test_fields_have_the_paths_that_cpp_gives_them(tmp_path: pathlib.Path) -> None:
    header = tmp_path / "whole.h"
    header.write_text(HEADER)
    text = declarations_source([header])
    whole = text[text.index("FDSD_STRUCT(WholeParams)") :].splitlines()
    assert whole[1:6] == [f"FDSD_FIELD({path})" for path in ("n", "out.y", "part.data", "part.kind")] + ["FDSD_END"]
    assert "FDSD_STRUCT(WholeParams::Output)" in text
    assert [line for line in text.splitlines() if line.startswith("FDSD_OP")] == [
        "FDSD_OP(Whole, whole)",
        "FDSD_OP(TopPWhole, top_p_whole)",
    ]


@pytest.mark.parametrize("line", ["  int32_t a, b;", "  int32_t a[2];", "  int32_t n = 0;", "  int32_t Count() const;"])
def test_a_line_in_another_style_is_an_error_that_names_it(tmp_path: pathlib.Path, line: str) -> None:
    header = tmp_path / "whole.h"
    header.write_text(HEADER.replace("  int32_t n;  // rows", line))
    with pytest.raises(BuildError, match=r"whole\.h:13: expected one declaration, field or brace, got"):
        declarations_source([header])
