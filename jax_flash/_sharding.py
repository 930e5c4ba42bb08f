"""Partitioning rules."""


def partitioned(run):
    return run
