"""The token loop: which request runs when, and when it ends. Knows no Paddle, sockets, text or HTTP."""
