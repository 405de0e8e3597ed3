"""Which files a training runs: by imports read, and by a training run."""

import subprocess
import sys

import pytest

from paraxis.configs.base import command_line
from paraxis.train.claims import papers
from paraxis.train.claims import sources

# One step on one device; then what is loaded.
RUN = """
import sys
import jax
from paraxis.configs import schema
from paraxis.train import loop

config = schema.default()
config.model.update(vocab_size=264, d_model=16, num_heads=2, num_layers=1)
config.data.update(sequence_length=32, tokenizer='bytes')
config.train.update(steps=1, batch_size=2, eval_batches=1)
one = jax.devices()[:1]
loop.run(schema.view(config), sys.argv[1], say=lambda line: None, devices=one)
for name in list(sys.modules):
  if name.startswith('paraxis.'):
    print(name.removeprefix('paraxis.').replace('.', '/') + '.py')
"""


@pytest.mark.sampled(6)
def test_a_training_loads_no_other_file(tmp_path):
  """Whatever is not found by the imports is left out by name."""
  command = [sys.executable, '-c', RUN, str(tmp_path / 'run')]
  done = subprocess.run(
    command, capture_output=True, text=True, cwd=tmp_path, check=False
  )
  assert done.returncode == 0, done.stderr
  loaded = {x for x in done.stdout.split() if (sources.ROOT / x).is_file()}
  executed = set(sources.executed())
  others = {x for x in loaded - executed if not sources._left_out(x)}
  assert not others and len(loaded & executed) > 0.9 * len(executed)


def test_kernels_layouts_and_data_are_executed():
  executed = set(sources.executed())
  named = (
    'models/decoder.py', 'models/mixers/tcn.py', 'models/text/tokenizer.py',
    'pallas_kernels/attention/xla.py', 'pallas_kernels/scans/gated_xla.py',
    'sharding/experts/dispatch.py', 'sharding/pipeline/ticks.py',
    'sharding/tensor/project.py', 'train/data/packing.py',
    'train/expert_counts.py', 'train/loss.py', 'train/updates/optimizers.py',
    'train/steps/pipeline_step.py', 'train/run/evaluate.py', 'train/step.py',
  )  # fmt: skip
  assert set(named) <= executed
  assert not [x for x in executed if sources._left_out(x)]
  outside = 'decode/', 'models/huggingface/', 'models/text/bpe', 'train/claims/'
  assert not [x for x in executed if x.startswith(outside)]


def test_what_is_left_out_exists():
  for name in sources.LEFT_OUT:
    assert (sources.ROOT / name).exists(), name


FILES = {
  'train/loop.py': 'from paraxis.models import one\nimport paraxis.models.two',
  'models/one.py': 'def late():\n  from paraxis.models import three, four',
  'models/two.py': 'from paraxis.models.one import late',
  'models/three.py': 'from paraxis.train import loop',
  'models/other.py': 'x = 1',
  'train/plot/draw.py': 'from paraxis.models import other',
}


def _tree(root, files):
  for name, text in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
  sources.executed.cache_clear()
  return sources.executed(root=root)


def test_imports_are_followed_wherever_they_stand(tmp_path):
  found = ('models/one.py', 'models/three.py', 'models/two.py', 'train/loop.py')
  assert _tree(tmp_path, FILES) == found
  drawn = FILES | {'models/two.py': 'from paraxis.train.plot import draw'}
  assert _tree(tmp_path, drawn) == found  # it is left out, and what it imports
  more = FILES | {'models/two.py': 'from paraxis.models import other'}
  assert set(_tree(tmp_path, more)) == {*found, 'models/other.py'}


def test_claims_are_found_by_a_link_to_the_package(monkeypatch, tmp_path):
  link = tmp_path / 'paraxis'
  link.symlink_to(sources.ROOT)
  there = lambda x: str(link / 'train/claims/lists.py')
  monkeypatch.setattr(sources.inspect, 'getsourcefile', there)
  assert 'train/claims/lists.py' in sources.of_claims(papers.claims)
  monkeypatch.setattr(sources.inspect, 'getsourcefile', lambda x: None)
  monkeypatch.chdir(sources.ROOT / 'train/claims/outer')
  assert sources.of_claims(papers.claims) == ()


OWN = {  # modules with a training of their own, and what it runs besides
  'paraxis.train.claims.scans.recall': (
    'train/claims/scans/recall.py', 'train/claims/tasks.py',
  ),
  'paraxis.train.claims.pipeline.skip': ('train/claims/pipeline/skip.py',),
}  # fmt: skip


def test_headers_name_what_claims_train_with():
  seen = set()
  for path in command_line.papers():
    named = papers.mechanism(path)
    module = command_line.load_module(str(path))
    for claim in papers.claims(module, path.name):
      if claim.kind == 'LEARN' and claim.check.__module__ in OWN:
        seen.add(claim.check.__module__)
        assert set(OWN[claim.check.__module__]) <= set(named), path.name
  assert seen == set(OWN)
