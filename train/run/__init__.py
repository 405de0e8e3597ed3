"""What a run on a machine needs: its folder, its processes, its numbers.

From outside: workdir.py, hosts.py, stop.py, metrics.py and evaluate.py; the
loop puts them together. roll_call.py is how the processes meet, ledger.py and
goodput.py account for a run's time, watchdog.py ends a process that is stuck.

Read first: workdir.py.
"""
