"""Messages and sockets between the HTTP processes and the engine process. Knows no HTTP, no model and no scheduling."""
