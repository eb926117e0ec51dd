"""Prefill and decode on different instances, and what all instances of a deployment share."""
