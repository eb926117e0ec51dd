"""`bench router`: what a router adds to requests and to streamed tokens, beside the same server without it.

Both ways are measured in turns, as a machine has good and bad moments. The router's own processor time is what it costs
where nothing else waits for the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.command import Command, markdown_table, show
from benchmarks.latency import cpu_us, first_token, stream
from benchmarks.processes import Address, running_router, running_server, wait_for_instances

_NUM_WARM_UP = 20
_DIRECT, _ROUTED = "direct", "through the router"


def main(argv: Sequence[str]) -> int:
    """Run the command and print the table."""
    command = Command(
        "router", "Start a router and a server, and measure what the router adds to the server's times.", "the server's"
    )
    command.number("--num-requests", 100, "of one token, per round")
    command.number("--clients", 16, "streams at once")
    command.number("--output-len", 100, "tokens of a stream")
    command.number("--rounds", 5, "of either way")
    command.json()
    args = command.read(argv)
    with running_router() as (router, pid):
        host, port = router
        with running_server(["--router", f"{host}:{port}", *args.others]) as (server, _):
            wait_for_instances(router, 1)
            ways = {_DIRECT: server, _ROUTED: router}
            for address in ways.values():
                first_token(address, _NUM_WARM_UP)
            results = _measure(ways, pid, args.rounds, (args.num_requests, args.clients, args.output_len))
    show(args, results, router_table(results))
    return 0


def _measure(ways: dict[str, Address], pid: int, num_rounds: int, sizes: tuple[int, int, int]) -> dict[str, float]:
    num_requests, num_clients, output_len = sizes
    request_ms: dict[str, list[float]] = {way: [] for way in ways}
    token_us: dict[str, list[float]] = {way: [] for way in ways}
    costs: dict[str, list[float]] = {"request": [], "token": []}

    def cost_of(unit: str, count: int, act: Callable[[], object], is_routed: bool) -> None:
        before = cpu_us({"router": pid})["router"]
        act()
        if is_routed:
            costs[unit].append((cpu_us({"router": pid})["router"] - before) / count)

    for _ in range(num_rounds):
        for way, address in ways.items():
            is_routed = way == _ROUTED

            def ask(address: Address = address, way: str = way) -> None:
                request_ms[way] += [sample.total for sample in first_token(address, num_requests)]

            def read(address: Address = address, way: str = way) -> None:
                begin = time.perf_counter()
                num_tokens = stream(address, num_clients, output_len)
                token_us[way].append(1e6 * (time.perf_counter() - begin) / num_tokens)

            cost_of("request", num_requests, ask, is_routed)
            cost_of("token", num_clients * output_len, read, is_routed)
    return router_metrics(request_ms, token_us, costs)


def router_metrics(
    request_ms: dict[str, list[float]], token_us: dict[str, list[float]], costs: dict[str, list[float]]
) -> dict[str, float]:
    """Return the medians of either way, their differences, and the router's processor time."""
    requests = {way: median(samples) for way, samples in request_ms.items()}
    tokens = {way: median(samples) for way, samples in token_us.items()}
    return {
        **{f"request of one token, {way}, ms": value for way, value in requests.items()},
        "added per request, ms": requests[_ROUTED] - requests[_DIRECT],
        **{f"streamed token, {way}, us": value for way, value in tokens.items()},
        "added per streamed token, us": tokens[_ROUTED] - tokens[_DIRECT],
        "router cpu per request, us": median(costs["request"]),
        "router cpu per streamed token, us": median(costs["token"]),
    }


def router_table(metrics: dict[str, float]) -> str:
    """Return the metrics as a Markdown table."""
    head = ("What a router adds: medians; streamed tokens are those of all streams side by side", "")
    return markdown_table(head, ((name, f"{value:.3f}") for name, value in metrics.items()))
