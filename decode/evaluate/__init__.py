"""Log-likelihoods of text under a model, and the figures made of them.

command.py is `paraxis evaluate`, ensemble.py the Scorer of several models,
harness.py lets lm-eval call the same Scorer.

Read first: score.py, then tasks.py.
"""
