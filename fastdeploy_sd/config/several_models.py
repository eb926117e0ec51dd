"""Reads the models of one server: `models`, a map of names to models, each with options of its own.

What is written outside of the map holds for every model; what is written in it wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from fastdeploy_sd.config.build import build_config
from fastdeploy_sd.config.catalogue import BY_NAME, MODELS_OPTION
from fastdeploy_sd.config.faults import Faults
from fastdeploy_sd.config.maps import read_object
from fastdeploy_sd.config.option import wrong_value
from fastdeploy_sd.config.parallel_section import Neighbours
from fastdeploy_sd.config.sections import Config
from fastdeploy_sd.config.sources import Setting, Settings, collect, read_command_line
from fastdeploy_sd.config.splitwise_section import ports_of
from fastdeploy_sd.errors import ConfigError, shown

_NAMES = "served_model_name"
# What all models of a server have in common.
_COMMON_SECTIONS = ("server", "redis")
_COMMON = ("pd_host", "pd_secret", "ips", "node_rank", "node_port", "timeout_nodes", "local_data_parallel_id")
# What several models of a command cannot have -> the value that asks for nothing.
_ALONE: Mapping[str, object] = {
    "ips": (),
    "local_data_parallel_id": None,
}
_ALTERNATIVE = f"with several {MODELS_OPTION} (give the model a command of its own, with the same router)"


def load_configs(
    argv: Sequence[str], prog: str = "fastdeploy-sd serve", description: str = "Serve models over the OpenAI API."
) -> tuple[Config, ...]:
    """Return the configuration of each model of a command line, as `load_config`; they share the options of HTTP."""
    faults = Faults()
    settings = read_command_line(argv, prog, description, faults)
    given = settings.pop(MODELS_OPTION, None)
    if given is None:
        return (build_config(settings, faults),)
    own = dict[str, Settings]()
    with faults.collecting(given.position, given.origin):
        for name, value in _read_models(given.value).items():
            with faults.collecting(given.position, given.origin):
                own[name] = _own_settings(name, value, given, faults)
    for name in ("model", _NAMES):
        if name in settings:
            error = wrong_value(name, f"none, as {MODELS_OPTION} has one of each model", shown(settings[name].value))
            faults.add(error, settings[name].position, settings[name].origin)
    faults.raise_all()
    configs = list[Config]()
    for of_model in own.values():
        with faults.collecting():
            configs.append(build_config(settings | of_model, Faults()))
    faults.raise_all()
    _verify_together(configs, faults)
    faults.raise_all()
    return _divided(configs)


def _read_models(value: object) -> dict[str, object]:
    """Return name -> a model or a map of its options, from a map, its JSON text, texts NAME=MODEL or a list of these.

    Raises ConfigError: it is none of them, or a name is repeated.
    """
    found = dict[str, object]()
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and "=" in item and not item.lstrip().startswith("{"):
            name, _, model = item.partition("=")
            part: dict[str, object] = {name: model}
        else:
            part = read_object(MODELS_OPTION, item)
        if twice := part.keys() & found:
            raise wrong_value(MODELS_OPTION, "every name once", f"{min(twice)!r} again")
        found |= part
    if not found or not all(found):
        raise wrong_value(MODELS_OPTION, "names of models, as NAME=MODEL", shown(value))
    return found


def _own_settings(name: str, value: object, given: Setting, faults: Faults) -> Settings:
    place = f"{MODELS_OPTION}.{name}"
    options = {"model": value} if isinstance(value, str) else value
    if not isinstance(options, Mapping):
        raise wrong_value(place, "a model, or a map of its options", shown(value))
    origin = f"{place}, {given.origin}"
    settings = collect(((key, item, origin, given.position) for key, item in options.items()), faults)
    if "model" not in settings:
        raise ConfigError(f"{place}.model: expected {BY_NAME['model'].expected}, got nothing", param=MODELS_OPTION)
    for key in settings:
        if key in _COMMON or (key in BY_NAME and BY_NAME[key].section in _COMMON_SECTIONS):
            raise wrong_value(f"{place}.{key}", f"outside of {MODELS_OPTION}, as all share it", "it of one model")
    more = settings.get(_NAMES)
    others = BY_NAME[_NAMES].convert(more.value) if more is not None else None
    return settings | {_NAMES: Setting([name, *(others or ())], origin, given.position)}


def _verify_together(configs: Sequence[Config], faults: Faults) -> None:
    owners = dict[str, str]()
    for config in configs:
        named = [(name, _NAMES) for name in config.model.served_names]
        for name, option in (*named, *((name, "lora_modules") for name, _ in config.lora.modules)):
            if name in owners:
                place = f"{MODELS_OPTION}.{config.model.served_name}.{option}"
                faults.add(wrong_value(place, f"names of one model, as {owners[name]!r} has it too", repr(name)))
            owners[name] = config.model.served_name
    port_owners = dict[int, str]()
    for config in configs:
        name = config.model.served_name
        taken = [(option, port) for option, port in _ports(config) if port_owners.setdefault(port, name) != name]
        for option, port in taken[:1]:
            place = f"{MODELS_OPTION}.{name}.{option}"
            faults.add(wrong_value(place, f"ports of one model, as {port_owners[port]!r} has it too", str(port)))
    if len(configs) == 1:
        return
    for name, accepted in _ALONE.items():
        alone = BY_NAME[name]
        value = getattr(getattr(configs[0], alone.section), alone.field_name)
        if value != accepted:
            faults.add(wrong_value(name, f"{accepted or 'none'} {_ALTERNATIVE}", shown(value)))
    if any(config.parallel.shares_experts for config in configs):
        text = f"false with data_parallel_size {_ALTERNATIVE}"
        faults.add(wrong_value("enable_expert_parallel", text, "true"))


def _ports(config: Config) -> Iterator[tuple[str, int]]:
    """Yield the ports between instances that are written for the engines of a model, and their options."""
    splitwise, count = config.splitwise, config.parallel.data_parallel_size
    if splitwise.splitwise_role == "prefill":
        for engine in range(count):
            yield from (("pd_comm_port", port) for port in ports_of(splitwise.pd_comm_port, engine, count) if port)
    if splitwise.splitwise_role != "mixed":
        for engine in range(count):
            ports = ports_of(splitwise.rdma_comm_ports, engine, count)
            yield from (("rdma_comm_ports", port) for port in range(min(ports, default=0), max(ports, default=-1) + 1))


def _divided(configs: Sequence[Config]) -> tuple[Config, ...]:
    """Return the configurations with what each model's engines share this host with."""
    counts = [config.parallel.engines_per_host for config in configs]
    ranks = [config.parallel.tensor_parallel_size * count for config, count in zip(configs, counts, strict=True)]
    before = [0, *accumulate(counts)]
    ranks_before = [0, *accumulate(ranks)]

    def placed(index: int, config: Config) -> Config:
        neighbours = Neighbours(before[index], before[-1] - before[index + 1], ranks_before[index])
        return replace(config, parallel=replace(config.parallel, neighbours=neighbours))

    return tuple(placed(index, config) for index, config in enumerate(configs))
