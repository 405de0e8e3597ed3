"""What configs claim, and `paraxis reproduce`, which runs the claims.

papers.py reads headers and checks that claims are well formed, harness.py runs
them, experiment.py holds what claims share (fields, certificates, trainings),
families.py trains variants of a config. The rooms hold the claims by mechanism:
configs name their functions, and no claim imports another.

Read first: papers.py, then harness.py, then experiment.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
