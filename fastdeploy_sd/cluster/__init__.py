"""Several instances: membership, placement, the router, requests shared through Redis."""
