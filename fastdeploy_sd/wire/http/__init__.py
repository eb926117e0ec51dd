"""The HTTP server under the API and the router: connections, limits, errors, event streams."""
