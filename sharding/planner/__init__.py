"""Cost of a schedule or a layout before it is built.

From outside: simulate.py (time of a pipeline schedule), auto_rules.py and
program_axes.py (mesh.rules=auto). conversions.py and signatures.py are used by
claims only: training uses sharding/annotate.py and sharding/rules.py instead.

Read first: simulate.py.
"""
