"""Collects the faults of a configuration, so that one start shows all of them. Knows no option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastdeploy_sd.errors import ConfigError

# Where something was written: (source, place in it). Sorts as people read: the file, then the command line.
Position = tuple[int, int]
LAST: Position = (9, 0)


class SeveralFaultsError(ConfigError):
    """Several faults. The message counts them in its first line and has one line for each; `param` is the first's.

    Attributes:
        faults: at least two, in order.
    """

    def __init__(self, faults: tuple[ConfigError, ...]) -> None:
        lines = [f"{len(faults)} faults in the configuration", *(f"  {fault.message}" for fault in faults)]
        super().__init__("\n".join(lines), param=faults[0].param)
        self.faults = faults


class Faults:
    """The faults found so far. Equal texts count once: a rule may be broken in two ways that read the same."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Position, ConfigError]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def params(self) -> set[str | None]:
        """The options at fault."""
        return {error.param for _, error in self._found.values()}

    def add(self, error: ConfigError, position: Position = LAST, origin: str = "") -> None:
        """Note an error, or each of several in one; `origin` is added to the text of each."""
        for fault in error.faults if isinstance(error, SeveralFaultsError) else (error,):
            located = ConfigError(f"{fault.message} ({origin})", param=fault.param) if origin else fault
            self._found.setdefault(located.message, (position, located))

    @contextmanager
    def collecting(self, position: Position = LAST, origin: str = "") -> Iterator[None]:
        """Note the ConfigError that ends the block, and continue after the block."""
        try:
            yield
        except ConfigError as error:
            self.add(error, position, origin)

    def raise_all(self) -> None:
        """Raise what was found, if anything: a single error as it is, several as one.

        Raises ConfigError: something was found; the errors are in the order of their positions.
        """
        errors = tuple(error for _, error in sorted(self._found.values(), key=lambda found: found[0]))
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise SeveralFaultsError(errors)
