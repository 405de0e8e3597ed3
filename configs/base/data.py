"""The section `data` of a configuration."""

import dataclasses

from paraxis.configs.base.field import MOST_LENGTH
from paraxis.configs.base.field import field


@dataclasses.dataclass(frozen=True)
class Data:
  """Documents -> tokens -> packed rows."""

  path: str = field(
    'fixture',
    "'fixture' (shipped), 'corpus' (paraxis data fetch), or a file, a folder "
    'or a glob of text: .txt, .md, .jsonl (also .gz, .zst), .parquet, .bin '
    '(tokens of nanoGPT), folders of Hugging Face datasets, one file of UTF-8 '
    'without a suffix (text8). A .txt or .md directly in the folder is a '
    'domain of its own: put files of one kind in a sub-folder and name its '
    'parent. In one folder the files train are trained on and validation, '
    'valid, val, dev, eval and test held out, where both kinds are there',
  )
  text_key: str = field(
    'text', 'key or column of the text in tables and .jsonl'
  )
  sources: str = field(
    '',
    "instead of path, paths with weights: 'a.txt:0.7,b/*.jsonl:0.3'; rows come "
    'from them in these proportions, whatever their sizes',
  )
  tokenizer: str = field(
    'bpe2048',
    "'bpe2048' (shipped), 'bytes', a tokenizer.json, or 'ids' (of .bin files, "
    'as they are)',
  )
  chat_template: str = field(
    '',
    'file of Jinja for .jsonl with messages; empty: the one beside the '
    'tokenizer.json',
  )
  loss_on: str = field(
    'all',
    'tokens of a conversation that carry loss: all, or those of the assistant',
    ('all', 'assistant'),
  )
  sequence_length: int = field(256, 'tokens in a row', low=1, high=MOST_LENGTH)
  packing: str = field(
    'concat_split',
    'concat_split: documents end to end, cut every sequence_length tokens; '
    'first_fit: documents whole if they fit in a row',
    ('concat_split', 'first_fit'),
  )
  mixture: str = field(
    '', "sampling weights of domains, 'code=2,drama=1'; empty: by size"
  )
  held_out_fraction: float = field(
    0.1,
    "share of a domain's bytes, in whole documents, held out if the data names "
    'no split; where files of your own are so large that it may be more than '
    '5 MB, 5 MB of a domain at most',
    low=0.0,
    high=0.9,
  )
  cache_dir: str = field(
    '', 'token cache; empty: a folder in the user cache directory'
  )
  workers: int = field(
    0, 'processes that tokenize; 0: one a core, up to 16', low=0, high=256
  )
  prefetch: int = field(2, 'batches prepared ahead of the step', low=0)
