"""Pictures of records: a grid of panels as a PNG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastdeploy_sd.errors import ConfigError

_PANEL_INCHES = (4.0, 3.2)
_DPI = 120


@contextmanager
def panels(
    path: Path,
    num_rows: int,
    num_columns: int,
    title: str,
    share_y: str = "none",
    inches: tuple[float, float] = _PANEL_INCHES,
) -> Iterator[Any]:
    """Yield panels[row][column] to draw into; the file is written at the end of the block.

    Args:
        inches: width and height of a panel.
        share_y: "row" = the panels of a row have one scale.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: expected matplotlib, got none; pip install 'fastdeploy-sd[bench]'") from None
    width, height = inches
    figure = Figure((width * num_columns, height * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(num_rows, num_columns, squeeze=False, sharey=share_y)
    figure.suptitle(title)
    figure.savefig(path, dpi=_DPI)
