"""Cost of a schedule or a layout before it is built.

From outside: simulate.py (time of a pipeline schedule). conversions.py,
signatures.py and auto_rules.py are used by claims only: training uses
sharding/annotate.py and sharding/rules.py instead.

Read first: simulate.py.
"""
