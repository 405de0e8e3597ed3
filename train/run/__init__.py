"""What a run on a machine needs: its folder, its processes, its numbers.

From outside: workdir.py, hosts.py, stop.py, metrics.py and evaluate.py; the
loop puts them together.

Read first: workdir.py.
"""
