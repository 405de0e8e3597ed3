"""What configs claim, and `paraxis reproduce`, which runs the claims.

papers.py reads headers and checks that claims are well formed, harness.py runs
them, knockouts.py without their mechanism; experiment.py holds what claims
share (fields, certificates), ablation.py trains variants of a config over
seeds, gang.py starts several processes. The rooms hold the claims by mechanism:
configs name their functions, and no claim imports another.

Read first: papers.py, then harness.py, then experiment.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
