"""The bodies of the routes about experts that are spread over ranks, as FastDeploy has them."""

from __future__ import annotations

from typing import Annotated

from fastdeploy_sd.entrypoints.openai.protocol.fields import Body, Ignored, Matching, Only


class ExpertsBody(Body):
    """What all of them have.

    Attributes:
        user, passwd: those of `eplb_config`; left out = "".
    """

    user: str = ""
    passwd: str = ""


class RearrangeBody(ExpertsBody):
    """POST /rearrange_experts.

    Attributes:
        ips: ignored: the ranks of a server know each other.
        action: only "": ranks take counts and weights by themselves.
    """

    ips: Ignored = None
    action: Annotated[None, Only("", instead='only "" is: ranks take counts and weights by themselves')] = None


class ExpertTokensBody(ExpertsBody):
    """POST /get_per_expert_tokens_stats.

    Attributes:
        clear_stat: later answers count from now on.
    """

    clear_stat: bool = False


class CheckRedundantBody(ExpertsBody):
    """POST /check_redundant.

    Attributes:
        action: "" asks for the status, "check_load_weight_result" for each rank's.
        check_get_workloads: add the rows of experts and their places.
    """

    action: Annotated[str | None, Matching("^(check_load_weight_result)?$", '"" or "check_load_weight_result"')] = None
    check_get_workloads: bool = False
