"""Claims about replicas that exchange less than a gradient every step.

Named by configs such as diloco. steps.py: what those that step alone compute
and send in a step; equations.py: what an exchange computes; exchanges.py: what
is exchanged; learning.py: what is learned; decentralized.py: nodes of a graph;
directions.py: two halves that exchange a number; coding.py: workers of which
some are late; domains.py: experts that never exchange anything; bilevel.py:
minimisers of which some are read.

Read first: steps.py.
"""
