"""Claims about replicas that step alone, and exchange now and then.

Named by configs such as diloco. steps.py: what they compute and send in a step;
exchanges.py: what is exchanged; learning.py: what is learned; decentralized.py:
nodes of a graph.

Read first: steps.py.
"""
