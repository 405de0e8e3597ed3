"""Every notebook runs from top to bottom, and shows what it promises.

A copy of each is executed as a reader would, in a kernel of its own, with fewer
steps (PARAXIS_STEPS) and an empty cache folder. A cell that fails fails the
test. The file itself is kept with the outputs of a whole run
(notebooks/keep_outputs.py), as a code host shows it.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
from typing import Any

import jax
from nbclient import exceptions
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / 'notebooks'
NAMES = sorted(path.stem for path in NOTEBOOKS.glob('*.ipynb'))
SECONDS = 600  # of one cell, before the kernel counts as hung
MACHINE = re.compile(r'(?<![\w.)}~/-])/(?:root|home|work|Users|tmp|var)/\w')


def _tool() -> Any:
  """The module notebooks/keep_outputs.py."""
  spec = importlib.util.spec_from_file_location(
    'keep_outputs', NOTEBOOKS / 'keep_outputs.py'
  )
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def read(name):
  return nbformat.read(NOTEBOOKS / f'{name}.ipynb', as_version=4)


def execute(notebook, folder):
  """Runs a copy of a notebook in `folder` -> the copy with outputs.

  Raises:
    exceptions.CellExecutionError: a cell failed.
  """
  return _tool().execute(notebook, folder, SECONDS)


def outputs(notebook):
  """(all text that a notebook shows, number of pictures)."""
  text, pictures = [], 0
  for cell in notebook.cells:
    for output in cell.get('outputs', ()):
      data = output.get('data', {})
      text += [output.get('text', ''), data.get('text/plain', '')]
      pictures += 'image/png' in data
  return '\n'.join(text), pictures


def shown(folder, name):
  """Runs a notebook -> what it shows; as many pictures are in the file."""
  text, pictures = outputs(execute(read(name), folder))
  kept = outputs(read(name))[1]
  assert pictures == kept, 'python notebooks/keep_outputs.py'
  return text, pictures


def found(pattern, text, flags=0) -> re.Match:
  """The first match; AssertionError if there is none."""
  match = re.search(pattern, text, flags)
  assert match, pattern
  return match


def faults(notebook, size):
  """What is wrong with the outputs that a notebook is kept with."""
  text, pictures = outputs(notebook)
  cells = [c for c in notebook.cells if c.cell_type == 'code']
  every = [o for c in cells for o in c.outputs]
  found = [f'a machine path: {m.group()}' for m in MACHINE.finditer(text)]
  if not pictures or not text.strip():
    found.append('no picture or no text')
  if any(o.output_type == 'error' for o in every):
    found.append('an error')
  if [c.execution_count for c in cells] != list(range(1, len(cells) + 1)):
    found.append('not run from top to bottom')
  if size > _tool().LIMIT:
    found.append(f'{size} bytes')
  return found


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_is_kept_with_its_outputs(name):
  size = (NOTEBOOKS / f'{name}.ipynb').stat().st_size
  assert not faults(read(name), size)


def test_outputs_that_are_not_kept_are_found():
  notebook = read(NAMES[0])
  cells = [c for c in notebook.cells if c.cell_type == 'code']
  cells[0].outputs.append(
    nbformat.v4.new_output('stream', text='in ' + '/home' + '/me/x')
  )
  assert faults(notebook, 1) == ['a machine path: /ho' + 'me/m']
  cells[0].execution_count = 9
  for cell in cells:
    cell.outputs = []
  found = ['no picture or no text', 'not run from top to bottom']
  assert faults(notebook, 10**6) == [*found, '1000000 bytes']


def test_outputs_are_cleaned():
  tool, new = _tool(), nbformat.v4
  folder = tool.tempfile.mkdtemp()
  one = new.new_output('stream', name='stdout', text=f'in {folder}/run\n')
  two = new.new_output('stream', name='stdout', text='more\n')
  cell = new.new_code_cell('1', outputs=[one, two], metadata=dict(a=1))
  (cell,) = tool.clean(new.new_notebook(cells=[cell])).cells
  (output,) = cell.outputs
  assert output.text == 'in ./run\nmore\n' and not cell.metadata


def test_the_badge_opens_the_notebook():
  """Once CITATION.cff names the repository; until then README says how."""
  said = re.search(
    r'repository-code: .*github.com/([\w.-]+/[\w.-]+)',
    (ROOT / 'CITATION.cff').read_text(),
  )
  for name in NAMES:
    (badge,) = re.findall(
      r'\(https://colab.research.google.com/(.*?)\)',
      read(name).cells[0].source.replace('assets/', ''),
    )[1:]
    file = f'blob/main/notebooks/{name}.ipynb'
    assert badge == (f'github/{said[1]}/{file}' if said else '')
  readme = (ROOT / 'README.md').read_text()
  assert said or 'colab.research.google.com/github/OWNER/NAME' in readme


def test_the_first_cell_installs_what_is_not_installed(monkeypatch, tmp_path):
  """Also beside a clone named paraxis, which can be imported from there."""
  code = lambda name: [c for c in read(name).cells if c.cell_type == 'code']
  (text,) = {code(name)[0].source for name in NAMES}
  file, found = tmp_path / 'cell.py', []
  file.write_text(text.replace('%pip install -q {SOURCE}', 'found.append(1)'))
  runpy.run_path(str(file), dict(found=found))
  assert not found

  def version(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, 'version', version)
  runpy.run_path(str(file), dict(found=found))
  assert found


@pytest.mark.parametrize(
  'name, starts',
  [
    (
      '01_meshes_and_layouts',
      ('def small(', 'built = ', 'for name, meaning in rules.LOGICAL'),
    ),
    ('03_mixers', ('for letter, mixer in layer.MIXERS',)),
    ('06_parallel_decoding', ('for name, (drafts, claim) in METHODS',)),
  ],
)
def test_tables_are_kept_as_they_are(name, starts, tmp_path, capsys):
  """Of cells that print what the code has, and need no training."""
  cells = [c for c in read(name).cells if c.cell_type == 'code']
  lines = [line for c in cells for line in c.source.splitlines()]
  code = [x for x in lines if re.match(r'(import|from) \S', x)]
  kept = ''
  for start in starts:
    (cell,) = (c for c in cells if c.source.startswith(start))
    code.append(cell.source)
    kept += ''.join(output.text for output in cell.outputs)
  file = tmp_path / 'cells.py'
  file.write_text('\n'.join(code))
  with jax.enable_x64(True):
    runpy.run_path(str(file))
  assert capsys.readouterr().out == kept, 'python notebooks/keep_outputs.py'


@pytest.fixture
def few_steps(monkeypatch, tmp_path):
  """A folder to run in. The kernel's paths must not depend on where it is."""
  given = os.environ.get('PYTHONPATH', '').split(os.pathsep)
  absolute = os.pathsep.join(os.path.abspath(p) for p in given if p)
  monkeypatch.setenv('PYTHONPATH', absolute)
  monkeypatch.setenv('PARAXIS_STEPS', '4')
  # A kernel has no guard against programs that may hang (compile_store.py).
  monkeypatch.setenv('JAX_ENABLE_COMPILATION_CACHE', 'false')
  monkeypatch.setenv('PARAXIS_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setenv('TMPDIR', str(tmp_path))
  return tmp_path


def test_every_notebook_has_a_test():
  tests = pathlib.Path(__file__).read_text(encoding='utf-8')
  for path in NOTEBOOKS.glob('*.ipynb'):
    assert f"'{path.stem}'" in tests, path.name


def test_first_run(few_steps):
  text, pictures = shown(few_steps, '00_first_run')
  assert pictures == 2
  for part in (
    "('tensor', 'fsdp')",  # the embedding's layout, drawn
    'loss on one device',
    'held-out bits per byte',
    'resumed from step 4, every leaf verified',
    'steps 1 to 6 in one metrics.jsonl',
  ):
    assert part in text, part
  samples = text[text.index('=== scripture') :].split('=== ')[1:]
  prompts = {
    'scripture': 'And it',
    'drama': '[Enter',
    'code': 'def',
    'manual': 'The',
    'dictionary': 'house',
    'translation': 'en: Delete',
  }
  for sample, (domain, prompt) in zip(samples, prompts.items(), strict=True):
    assert sample.startswith(f'{domain}\n{prompt}')
    # Tokens follow the prompt.
    assert len(sample.strip()) > len(f'{domain}\n{prompt}') + 5


def test_meshes_and_layouts(few_steps):
  text, pictures = shown(few_steps, '01_meshes_and_layouts')
  assert pictures == 3  # who holds what, what it costs, the losses
  for part in (
    "'replica': 1, 'stage': 1, 'data': 2, 'fsdp': 2, 'context': 1, 'tensor': 2",
    'residual_length  context, tensor',
    'does not divide: vocab=2,048',
    'With tensor=4 or 8 its parts divide.',
    'tensor=8: 4,096 chips',
    '70,553,706,496 parameters',
  ):
    assert part in text, part
  # Collectives by kind and mesh axis, a table a layout.
  tables = [t.split('all  ')[0] for t in text.split('=== ')[1:]]
  kinds = {
    'data=8, ZeRO-1': {('reduce-scatter', 'data'), ('all-gather', 'data')},
    'fsdp=8': {('reduce-scatter', 'fsdp'), ('all-gather', 'fsdp')},
    'tensor=8': {('reduce-scatter', 'tensor'), ('all-gather', 'tensor')},
    'context=8, ring': {('collective-permute', 'context')},
    '2 x 2 x 2': {('all-gather', 'fsdp'), ('reduce-scatter', 'tensor')},
  }
  assert [t.split('\n')[0] for t in tables] == list(kinds)
  for table, wanted in zip(tables, kinds.values(), strict=True):
    rows = {tuple(line.split()[:2]) for line in table.split('\n')[2:]}
    assert wanted <= rows, table
  assert found(r'ZeRO-1: 2\.00\d P', text)
  assert found(r'fsdp=8: (2\.99|3\.00)\d P', text)
  # One line a layout: last loss, difference, bytes counted and predicted.
  lines = {
    name: found(rf'^{name} +(\d.*)$', text, re.M)[1].split()
    for name in ('one device', *kinds)
  }
  losses = {values[0] for values in lines.values()}
  assert len(losses) == 1  # nine decimals
  for name in kinds:
    _, apart, counted, predicted = map(float, lines[name])
    assert apart < 1e-12
    assert 0 < counted == pytest.approx(predicted, rel=0.02)


def test_pipelines(few_steps):
  text, pictures = shown(few_steps, '02_pipelines')
  names = (
    'gpipe', 'one_f_one_b', 'interleaved', 'zero_bubble', 'v_half', 'skip'
  )  # fmt: skip
  assert pictures == len(names)
  for name in names:
    line = found(rf'^{name} +loss (\S+), gradients (\S+) apart$', text, re.M)
    one = found(r'^one device +loss (\S+)$', text, re.M)
    assert float(line[1]) == pytest.approx(float(one[1]), abs=1e-11)
    assert float(line[2]) < 1e-12
  for part in (
    '3 F3 .      F2 .      F1 .      F0 B0',  # the table, printed
    'interleaved   26 ticks, faults []',
    'zero_bubble   32     0.0625   0.0625  0.0312 0.0312',
    'gpipe             8     16     32',
    'one_f_one_b       7      7      7',
    "embedding (64, 32) P('stage', None)",
  ):
    assert part in text, part


def test_a_cell_that_fails_is_seen(tmp_path):
  broken = nbformat.v4.new_notebook(
    cells=[nbformat.v4.new_code_cell('raise RuntimeError("on purpose")')]
  )
  with pytest.raises(exceptions.CellExecutionError, match='purpose'):
    execute(broken, tmp_path)


def test_mixers(few_steps):
  text, pictures = shown(few_steps, '03_mixers')
  assert pictures == 1
  for part in (
    'M: 43% of the sublayers',
    'F: 7% of the sublayers',
    'mlp: 50%',
    'M  Mamba2               decoding keeps a state of one size',
  ):
    assert part in text, part
  # MiB by length: attention grows 64 times, a state not at all.
  kept = {}
  for pattern in ('F', 'M', 'M-M-M-*-M-M-M-'):
    row = found(rf'^{re.escape(pattern)} +([\d. ]+)$', text, re.M)
    kept[pattern] = list(map(float, row[1].split()))
  assert kept['F'][2] == 64 * kept['F'][0] and kept['M'][0] == kept['M'][2]
  mixed = kept['M-M-M-*-M-M-M-']
  assert 5 < kept['F'][2] / mixed[2] < 7
  for letter in 'GMR':
    line = rf'^{letter}  loss (\S+) and (\S+), gradients equal$'
    loss = found(line, text, re.M)
    assert float(loss[1]) == pytest.approx(float(loss[2]), abs=1e-11)
  bits = re.findall(r'^(.{14}) (\d\.\d{3}) held-out bits per byte$', text, re.M)
  assert len(bits) == 6 and all(2 < float(b) < 9 for _, b in bits)


def test_your_own_run(few_steps):
  text, pictures = shown(few_steps, '04_your_own_run')
  assert pictures == 1
  for part in (
    'extra Extra(ema=Extra(taps=3), decay=0.5)',
    'PASS  packing: others do not see one change',
    'paraxis: wrong.py:33: KeyError',
    'sums.txt: 52,288 tokens',
    'step 4/4',
    '=== prompt\n3 + 4 =',
  ):
    assert part in text, part


def test_kill_and_reshard(few_steps):
  text, pictures = shown(few_steps, '05_kill_and_reshard')
  assert pictures == 1  # where the time of the killed run went
  kill = int(found(r'SIGKILL once step (\d+) is in metrics', text)[1])
  line = r'rank 0 died \(signal 9\) after step (\d+); .* committed step (\d+) '
  died, resumed = map(int, found(line, text).groups())
  assert resumed < kill <= died < 40
  # Hex floats, a row a step: uninterrupted, before the kill, after resuming.
  row = r'^ *(\d+)((?:  +0x1\.[0-9a-f]+p\+\d)+)$'
  rows = [(int(t), x.split()) for t, x in re.findall(row, text, re.M)]
  assert {len(x) for t, x in rows if resumed < t <= kill} == {3}
  assert rows[-1][0] > died and all(len(set(x)) == 1 for _, x in rows)
  apart = re.findall(rf'^steps {resumed + 1} to 40: losses (\S+) ', text, re.M)
  assert len(apart) == 2 and all(float(x) <= 2e-6 for x in apart)
  codes = re.findall(r'^\$ paraxis (.*)(?s:.*?)^exit code (\d+)$', text, re.M)
  assert codes == [
    ('checkpoint diff whole killed', '0'),
    (f'checkpoint inspect --checkpoint=killed/{resumed}', '0'),
    ('checkpoint diff whole fsdp8', '1'),
    ('checkpoint verify --checkpoint=flipped', '14'),
    ('checkpoint verify --checkpoint=flipped', '0'),
    ('plot --goodput --workdir=killed', '0'),
  ]
  for part in (
    'the runs are alike at 8, 16, 24, 32, 40\n0 of 25 leaves differ',
    f'step {resumed + 8}: 25 leaves',
    ' DAMAGED: leaf ',
    'Trying an older one.',
    f' damaged-{resumed + 8}-',
    'config: mesh.stage was 1, is now 2',
    ' in 2 starts; ',
  ):
    assert part in text, part


def test_parallel_decoding(few_steps):
  text, pictures = shown(few_steps, '06_parallel_decoding')
  assert pictures == 1  # calls by the tokens that they made
  row = r'^([a-z][^\n]*?) +(\d+) calls +(\d+\.\d\d) tokens a call$'
  made = {name: float(x) for name, _, x in re.findall(row, text, re.M)}
  assert list(made)[:3] == ['one by one', 'prompt_lookup', 'jacobi']
  assert len(made) == 7 and made['one by one'] == 1
  assert min(made.values()) >= 1
  assert len(re.findall(r'^ +choice \d of head \d$', text, re.M)) == 16
  for part in (
    'medusa: 5 steps', 'eagle: 5 steps', 'eagle           drafts',
    'of 8 texts the same', 'typical    ', 'exit code 2',
  ):  # fmt: skip
    assert part in text, part


def test_diffusion(few_steps):
  text, pictures = shown(few_steps, '07_diffusion')
  assert pictures == 1  # nats by calls
  found(r'^held-out bits per byte \d\.\d{4} ', text, re.M)
  found(r'^held-out bits per byte \(upper bound\) \d\.\d{4} ', text, re.M)
  row = r'^([\w .]+?) +(\d+\.\d) +(\d+\.\d{3}) +(\d+\.\d)%$'
  calls = {name: float(n) for name, n, *_ in re.findall(row, text, re.M)}
  assert list(calls) == [
    'autoregressive', '1 a call', '2 a call', '4 a call', '8 a call', 'above .9'
  ]  # fmt: skip
  # 64 tokens in 8 blocks, each of them read once more; fewer where texts end.
  for name, most in (('1 a call', 72), ('2 a call', 40), ('8 a call', 16)):
    assert most / 3 <= calls[name] <= most
  masks = [x.count('□') for x in re.findall(r'^ +\d+ (.*)$', text, re.M)]
  assert len(masks) > 1 and masks[-1] == 0
  assert masks == sorted(set(masks), reverse=True)


def test_low_communication(few_steps):
  text, pictures = shown(few_steps, '08_low_communication')
  assert pictures == 2  # losses; who waits
  row = r'^([\w .,]+?) +([\d,]+) +([\d,]+) +([\d,]+)$'
  names = ['data parallel', 'mean', 'DiLoCo .4', 'streamed, 4 bits', 'NoLoCo']
  number = lambda text: int(text.replace(',', ''))
  sent = {n: list(map(number, x)) for n, *x in re.findall(row, text, re.M)}
  assert list(sent) == names
  assert sent['data parallel'][0] and not sent['data parallel'][1]
  assert all(not sent[n][0] and sent[n][1] for n in names[1:])
  # Of 154K parameters: 2 x 3/4 of 4 bytes, 3 halves of a byte, 4 bytes.
  size = 4 * 153_888
  assert sent['mean'][1] == sent['DiLoCo .4'][1] == 1.5 * size
  assert 0.375 * size <= sent['streamed, 4 bits'][1] < 0.38 * size
  assert sent['NoLoCo'][1] == size
  bits = r'^([\w .,]+?) +(\d\.\d{3}) bits per byte, +(\d+\.\d) times fewer'
  fewer = {n: float(x) for n, _, x in re.findall(bits, text, re.M)}
  assert list(fewer) == names
  assert fewer['data parallel'] == 1 and 49 < fewer['mean'] < 52
