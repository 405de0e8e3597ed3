"""What a step is made of, and what replicas do that step alone.

gradients.py has the gradient, in each of the worlds that a layout asks for;
pipeline_step.py a stage's part of it; replicas.py the step of each of several
replicas, outer.py what they exchange, and when; pairs.py exchanges of two,
codec.py numbers in four bits. events.py: nodes of a graph without common steps.
zeroth_order.py: a step without a gradient. coded.py: gradients of which some
may be missing. bilevel.py: a minimum over minimisers, which no run uses.

Read first: gradients.py.
"""
