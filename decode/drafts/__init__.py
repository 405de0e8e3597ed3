"""What drafts the tokens that a call of the model judges, and its training.

decode/proposal.py says what a method is, decode/methods.py lists them.

Read first: drafters.py, then heads.py and distill.py.
"""
