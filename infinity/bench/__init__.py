"""Bandwidth of this machine's links, each figure beside a ceiling measured in the same run.

A *contender* does one transfer and says how long it took. A *group* is contenders that do the same
work; the runner lets them take turns, so that a slow spell of the machine hits all of them and only
ratios within one round are trusted.
"""
