"""Text to batches: documents, tokens, packing; batch t depends on (seed, t).

From outside: batches.py; corpus.py for documents; fetch.py is a command. The
shipped text is in fixture/, the sources that can be fetched in sources.json.

Read first: batches.py, then packing.py, corpus.py.
"""

from paraxis.configs.base import moved

__getattr__ = moved.names_of(__name__)
