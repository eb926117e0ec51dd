"""The router: gives requests to instances that register with it, and goes on elsewhere when one fails. No Paddle."""
