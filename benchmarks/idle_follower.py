"""A rank that computes nothing, for `bench ranks`: what is left of a step is what rank 0 and it say to each other."""

from __future__ import annotations

from fastdeploy_sd.config import Config
from fastdeploy_sd.worker.ranks.commands import Attempt, BeginDrafts, ForgetDrafts, TakeOutput, TakePlan
from fastdeploy_sd.worker.ranks.rank_group import RankGroup


class IdleFollower:
    """See ranks.process.Follower."""

    def __init__(self, group: RankGroup) -> None:
        self.collectives = group.collectives

    def take(self, command: TakePlan | TakeOutput | BeginDrafts | ForgetDrafts) -> None:
        """Drop it."""

    def run(self, attempt: Attempt) -> None:
        """Be done."""


def create_follower(config: Config, group: RankGroup) -> IdleFollower:
    """See ranks.process.FollowerFactory."""
    return IdleFollower(group)
