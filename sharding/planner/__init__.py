"""Cost of a schedule, a layout or a failing machine before it is there.

From outside: simulate.py (time of a pipeline schedule), auto_rules.py and
program_axes.py (mesh.rules=auto). events.py is the one simulator of tasks that
wait for each other and for resources. Used by claims only are conversions.py
and signatures.py (training uses sharding/annotate.py and sharding/rules.py
instead), overlap.py (what overlapping a product with its collective gains),
task_devices.py (devices by the load of tasks), stragglers.py (which link, card
or rank is slow), failures.py (goodput of a run that fails) and
sequential_coding.py (gradients from workers of which some are late).

Read first: simulate.py, then events.py.
"""
