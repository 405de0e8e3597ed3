"""Starting the processes of a run, and starting them again after a crash.

command.py is `paraxis launch`; supervisor.py holds the processes of one
machine, places.py finds which machines there are. Standard library only.

Read first: supervisor.py.
"""
