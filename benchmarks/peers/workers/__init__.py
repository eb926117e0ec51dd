"""One program per peer that answers the driver's commands; each runs in its peer's own environment."""
