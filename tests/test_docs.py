"""What the pages say is there: paths, commands, flags, fields, the reading.

Nothing is run or compiled here; what commands do is tested beside them.
"""

import re

import house
import pytest

from paraxis.configs import schema
from paraxis.configs.base import command_line
from paraxis.configs.base import mixers
from paraxis.configs.base import model as model_schema
from paraxis.models import checks
from paraxis.train import cli

PAGES = ('README.md', 'BENCHMARKS.md', 'CONTRIBUTING.md', 'SECURITY.md')
# Without the tables that a program writes, which grow with the benches.
LONGEST = {'README.md': 255, 'BENCHMARKS.md': 125, 'CONTRIBUTING.md': 170}
TABLE = re.compile(r'<!-- bench (\w+) -->.*?<!-- /bench \1 -->', re.S)
READING = range(2500, 3501)  # lines
TOPS = '|'.join((*house.FOLDERS, 'tests', 'notebooks'))
PATH = re.compile(
  rf'(?<![\w/.~-])(?:{TOPS})/[\w./*-]*?(?:/(?![\w.*-])'
  r'|\.(?:py|ipynb|md|json|png)\b)'
)
LINK = re.compile(r'\]\(([^)#:]+)\)')
SPAN = re.compile(r'`([^`\n]+)`')
FENCE = re.compile(r'^```.*?\n(.*?)^```', re.M | re.S)


def paths(text):
  """Repository paths that a page or header names."""
  return {*PATH.findall(text), *LINK.findall(text)}


def commands(text):
  """[word, ...] of every `paraxis ...` in spans and fenced blocks."""
  joined = text.replace('\\\n', ' ').replace('\\|', '|')
  lines = SPAN.findall(re.sub(r'\n(?=[\w-])', ' ', FENCE.sub('', joined)))
  for block in FENCE.findall(joined):
    lines += block.splitlines()
  for line in lines:
    for one in re.split(r' [|#] ', line):
      words = one.strip().lstrip('# ').split()
      if words[:1] == ['paraxis'] and words[1:]:
        yield words[1:]


def fields(text):
  """Config fields that a page names: `--config.a.b=`, `a.b=value`, `a.b`."""
  sections = '|'.join(schema.Config.__dataclass_fields__)
  named = re.findall(r'--config\.([a-z_.]+)', text)
  spans = (re.match(rf'(?:{sections})(?:\.[a-z_]+)+(?=$|=)', s) for s in
           SPAN.findall(text.replace('\\|', '|')))  # fmt: skip
  return {*named, *(m[0] for m in spans if m)}


def pages(tree):
  """{name: text} of the pages and of the configs' headers."""
  out = {n: (tree.root / n).read_text(encoding='utf-8') for n in PAGES}
  for path in command_line.papers():
    text = path.read_text(encoding='utf-8')
    out[f'configs/{path.name}'] = text.split('"""')[1]
  return out


def test_named_paths_exist(tree):
  for page, text in pages(tree).items():
    for name in paths(text):
      assert list(tree.root.glob(name)), f'{page} names {name}'


def test_pages_are_short(tree):
  for page, most in LONGEST.items():
    text = TABLE.sub('', (tree.root / page).read_text())
    assert len(text.splitlines()) <= most, page


def test_named_fields_exist(tree):
  for page, text in pages(tree).items():
    for name in fields(text):
      value = schema.default()
      for part in name.split('.'):
        assert part in value, f'{page} names {name}'
        value = value[part]


def test_named_commands_and_flags_exist(tree, capsys):
  known = {}
  for page, text in pages(tree).items():
    for command, *rest in commands(text):
      if command == 'COMMAND':
        continue
      if command not in known:
        assert cli.main([command, '--help']) == 0, f'{page}: {command}'
        known[command] = capsys.readouterr().out
      for flag in re.findall(r'--(\w+)\b(?!\.)', ' '.join(rest)):
        common = flag in ('config', 'help', 'helpconfig')
        named = re.search(rf'--{flag}\b', known[command])
        assert common or named, f'{page}: --{flag}'
      for target in [r for r in rest[:1] if command == 'reproduce']:
        names = [p.stem for p in command_line.papers()]
        assert target in (*names, 'NAME', 'of', '--all'), f'{page}: {target}'
  assert {'train', 'verify', 'compile', 'bench'} <= known.keys()


def test_families_are_as_many_as_the_page_says(tree):
  """No more than are exact, and no fewer than a tenth less."""
  said = re.search(r'(\d+) Hugging Face families', pages(tree)['README.md'])
  table = (tree.root / 'models/huggingface/FAMILIES.md').read_text('utf-8')
  exact = re.search(r'(\d+) of \d+ are exact', table)
  assert said and exact
  assert 0.9 * int(exact[1]) <= int(said[1]) <= int(exact[1])
  assert int(exact[1]) == table.count('| exact |')


def speeds(bench):
  """{(peer, what): median} of the speeds of ours that a page of figures has."""
  row = r'\| (.+): speed of ours(?:, \w+)?(?: \(.*?\))? / (.+?) \| (.+?) \|'
  found = {}
  for what, peer, cells in re.findall(row, bench):
    found.setdefault((peer, what), cells.split(' / ')[1])
  return found


# Column of the README's table: what it is called in BENCHMARKS.md, by peer.
OVER = {
  'transformers': [
    ('hf', 'step'), ('hf_autocast', 'step'),
    ('sdpa', 'float32'), ('sdpa', 'bfloat16'), ('sdpa', '4080 tokens'),
    *(('sdpa', f'batch {n}') for n in (1, 8, 64)),
  ],
  'plain JAX': [
    ('plain JAX, unrolled', 'step'),
    ('dot_product_attention', 'float32'), ('dot_product_attention', 'bfloat16'),
    ('plain JAX', '4080 tokens'),
    *(('plain JAX', f'batch {n}') for n in (1, 8, 64)),
  ],
}  # fmt: skip


def test_the_speeds_of_the_readme_are_measured(tree):
  text = pages(tree)['README.md']
  found = speeds((tree.root / 'BENCHMARKS.md').read_text('utf-8'))
  for peer, names in OVER.items():
    (cells,) = re.findall(rf'^\| {peer}[^|]*\|([ \d.;|]+)\|$', text, re.M)
    said = re.findall(r'[\d.]+', cells)
    for number, name in zip(said, names, strict=True):
      digits = len(number.partition('.')[2])
      assert number == f'{float(found[name]):.{digits}f}', name


def test_the_layouts_of_the_readme_are_allowed(tree):
  text = (tree.root / 'README.md').read_text().split('\n## ')
  (text,) = (part for part in text if part.startswith('Layouts'))
  said = dict(re.findall(r'`([a-z_.]+)=([^`|]+)`', text))
  order, count = said['mesh.expert_order'], int(said['model.experts.count'])
  model = schema.Model(experts=model_schema.Experts(count=count))
  mesh = schema.Mesh(expert_order=order)
  assert len(checks.expert_order(mesh, model)) == count
  parted = [k for k, x in mixers.TABLE.items() if x.shares]
  names = ', '.join(f'`{k}`' for k in parted)
  assert f'over these axes ({names} not over stages)' in text


def test_the_reading_path_is_an_evening(tree):
  found = house.reading_path(tree.root)
  assert 10 <= len(found) <= 14
  assert sum(found.values()) in READING


@pytest.mark.parametrize(
  'text, found',
  [
    ('`train/loop.py` and `sharding/*/tape.py`', 2),
    ('metrics hold train/loss, in runs/quickstart/loss.png', 0),
    ('(see [here](BENCHMARKS.md)) or `tests/decode/`, `train/<room>/`', 2),
    ('--config=configs/mine.py', 1),
  ],
)
def test_paths_are_found(text, found):
  assert len(paths(text)) == found, paths(text)


def test_commands_and_fields_are_found():
  text = (
    'Run `paraxis train\n--config=a.py`, or\n```sh\nparaxis verify \\\n'
    '  --config.model.d_model=8 # paraxis decode\n```\n`mesh.zero=1`, `x.y`'
  )
  assert list(commands(text)) == [
    ['train', '--config=a.py'],
    ['verify', '--config.model.d_model=8'],
    ['decode'],
  ]
  assert fields(text) == {'model.d_model', 'mesh.zero'}
