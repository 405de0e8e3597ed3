"""Cost of a schedule, a layout or a failing machine before it is there.

From outside: simulate.py (time of a pipeline schedule), auto_rules.py and
program_axes.py (mesh.rules=auto). events.py is the one simulator of tasks that
wait for each other and for resources. Used by claims only are conversions.py
and signatures.py (training uses sharding/annotate.py and sharding/rules.py
instead), overlap.py (what overlapping a product with its collective gains) and
task_devices.py (devices by the load of tasks).

Read first: simulate.py, then events.py.
"""
