"""Special tokens of a vocabulary: which begins a document, which ends it.

Which beginning-of-document token: `<|domain|>` if the vocabulary has it; else
the one that tokenizer_config.json beside it says to add, or several, where
weights of others were trained with them (tokenizer.py: `stated`, `keep`); else
the vocabulary's general one (`<|bos|>`, `<s>`, ...); else, in a vocabulary of
ours that has only domain tokens (`<|end|>` tells it; the shipped one), the
first domain in sorted order. So text of an unknown domain is trained and
prompted with the same token.

Which end-of-document token: the end_token of tokenizer_config.json, by which
weights of others keep what their files call so; else the one with a known name
(`<|end|>`, `</s>`, ...); else the eos_token of tokenizer_config.json.
"""

import functools
import re

from paraxis.configs import schema
from paraxis.configs.base import errors

_BOS = ('<|bos|>', '<s>', '<bos>', '<|begin_of_text|>', '<|endoftext|>')
_END = ('<|end|>', '</s>', '<eos>', '<|end_of_text|>', '<|endoftext|>')
_OURS = '<|end|>'  # in every vocabulary of ours
_PAD = ('<|pad|>', '<pad>', '[PAD]')
# Control tokens of the same form that name no domain.
_CONTROL = frozenset(
  'pad end bos eos endoftext begin_of_text end_of_text '
  'unk sep im_start im_end eot_id eom_id'.split()
)


class Special:
  """What all vocabularies share: special tokens and their rules.

  Attributes:
    left_out: texts of special tokens that have no id here.
    first: id that a document of no domain begins with, where files state it.
    prefix: ids that it begins with, where weights of others have several.
    last: id that a document ends with, where files state it, of weights or
      because none of the known names is there.
  """

  left_out: tuple[str, ...] = ()
  first: int | None = None
  prefix: tuple[int, ...] = ()
  last: int | None = None

  name: str
  vocab_size: int  # 1 + the largest id
  fingerprint: str  # sha256 of the content, hex
  _special: dict  # text -> id, of special tokens

  @functools.cached_property
  def domains(self):
    """Sorted names of the domains that have their own bos token."""
    found = (re.fullmatch(r'<\|(\w+)\|>', text) for text in self._special)
    return tuple(sorted(m[1] for m in found if m and m[1] not in _CONTROL))

  @functools.cached_property
  def end_id(self):
    if self.last is not None:
      return self.last
    return self._find(_END, 'end-of-document', '{"eos_token": TEXT}')

  @functools.cached_property
  def pad_id(self):
    """Fills the end of a row; never seen by the loss. May equal end_id."""
    return self.end_id if self.own_pad_id is None else self.own_pad_id

  @property
  def own_pad_id(self):
    """Id of the token that is for padding alone; None: there is none."""
    return next((self._special[t] for t in _PAD if t in self._special), None)

  def opening(self, domain=None) -> list[int]:
    """Ids that a document of `domain` (None: unknown) starts with."""
    if self.prefix and domain not in self.domains:
      return [*self.prefix]
    return [self.bos_id(domain)]

  def bos_id(self, domain=None):
    """Id of the first token of a document of `domain` (None: unknown)."""
    if domain in self.domains:
      return self._special[f'<|{domain}|>']
    if self.prefix:
      return self.prefix[0]
    if self.first is not None:
      return self.first
    if self.domains and _OURS in self._special and not self._begins:
      return self._special[f'<|{self.domains[0]}|>']
    states = '{"bos_token": TEXT, "add_bos_token": true}'
    return self._find(_BOS, 'beginning-of-document', states)

  @property
  def _begins(self):
    """Whether a token is called by one of the names of a beginning."""
    return any(text in self._special for text in _BOS)

  @property
  def known_end(self):
    """Id of the token that is called by a known name of an end; None: none."""
    return next((self._special[t] for t in _END if t in self._special), None)

  @functools.cached_property
  def special_ids(self):
    """{id: text} of the special tokens."""
    return {i: text for text, i in self._special.items()}

  @property
  def specials(self):
    """Texts of the special tokens."""
    return *self._special, *self.left_out

  def name_of(self, token):
    """Text of a special token's id."""
    return next(text for text, i in self._special.items() if i == token)

  def is_ordinary(self, token):
    """Whether text may have the id, as far as the tokenizer says."""
    return False

  def require_domain(self, domain):
    """`domain`, or a UserError when this vocabulary has no token for it."""
    if domain not in self.domains:
      raise errors.UserError(
        f'tokenizer {self.name} has no domain {domain!r}; it has '
        f'{", ".join(self.domains) or "none"}.'
        + schema.suggest(domain, self.domains)
      )
    return domain

  def _find(self, candidates, kind, states):
    for text in candidates:
      if text in self._special:
        return self._special[text]
    raise errors.UserError(
      f'tokenizer {self.name} has no {kind} token: none of '
      f'{", ".join(candidates)} is among its {self.vocab_size} entries. If '
      f'another special token is, write {states} to tokenizer_config.json '
      'beside it.'
    )
