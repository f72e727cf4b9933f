"""Bandwidth of this machine's links, each figure beside a ceiling measured in the same run.

A *contender* does one transfer and returns its time. A *comparison* has those that do the same
work. The runner alternates between them, so that a slow spell of the machine affects all of them,
and only ratios within one round are trusted.
"""
