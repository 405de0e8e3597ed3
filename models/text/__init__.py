"""Text to token ids and back.

From outside: tokenizer.load. bpe2048.json is the shipped vocabulary.

Read first: tokenizer.py.
"""
