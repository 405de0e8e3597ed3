"""What a run on a machine needs: its folder, its processes, its numbers.

From outside: workdir.py, hosts.py, stop.py, metrics.py and evaluate.py; the
loop puts them together. launch_command.py starts its processes (supervisor.py),
on machines that places.py finds; roll_call.py is how they meet.

Read first: workdir.py.
"""
