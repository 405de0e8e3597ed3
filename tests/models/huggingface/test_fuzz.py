"""A config.json that is wrong anywhere is a model, or one line that says why.

Mutants have up to three changes, at any depth: another value, one of another
field, a field or an entry that is gone, or a field by another name.
"""

import copy
import resource
import types

import hf_families
import hypothesis
from hypothesis import strategies as st
import pytest

from paraxis.configs.base import errors
from paraxis.models import checks
from paraxis.models.huggingface import leaves
from paraxis.models.huggingface import source
from paraxis.models.huggingface.families import reader

# One of each kind of reader, and of the sizes that lists are made of.
NAMES = (
  'llama_yarn', 'gemma3_text', 'gpt_neo', 'granite_swa', 'ministral3', 'opt',
  'phi3_longrope', 'deepseek_v3', 'hunyuan_v1_moe', 'jamba', 'mixtral',
  'nemotron_h', 'recurrent_gemma', 'llada', 'llada_tied', 'Dream',
)  # fmt: skip
MOST_BYTES = 2**28  # that all mutants together may add to the process
GONE = object()
HUGE = (
  2**31, 10**12, 1e12, 2**63, 10**400, -(10**400), 1e308, 5e-324,
  float('nan'), float('inf'),
)  # fmt: skip
plain = st.one_of(
  st.none(), st.booleans(), st.integers(-3, 70), st.floats(),
  st.text(max_size=3), st.sampled_from(HUGE),
)  # fmt: skip
values = st.recursive(
  plain,
  lambda inner: st.one_of(
    st.lists(inner, max_size=4),
    st.dictionaries(st.text(max_size=3), inner, max_size=3),
  ),
  max_leaves=6,
)


def nodes(tree, path=()):
  """Paths to every value of parsed JSON."""
  inside = {dict: dict.items, list: enumerate}.get(type(tree))
  for key, value in inside(tree) if inside else ():
    yield (*path, key)
    yield from nodes(value, (*path, key))


@st.composite
def mutants(draw, config):
  config = copy.deepcopy(config)
  for _ in range(draw(st.integers(1, 3))):
    paths = list(nodes(config))
    if not paths:
      break
    *path, last = draw(st.sampled_from(paths))
    parent = config
    for key in path:
      parent = parent[key]
    others = st.sampled_from(list(config.values())).map(copy.deepcopy)
    new = draw(st.one_of(values, others, st.just(GONE)))
    if isinstance(parent, dict) and draw(st.integers(0, 9)) == 0:
      parent[draw(st.text(max_size=6))] = parent[last]
    if new is GONE:
      del parent[last]
    else:
      parent[last] = new
  return config


def files_of(config):
  """What source.Source opens: the tensors of an unchanged config.json."""
  model = hf_families.model_of(config)
  table = leaves.table(model, config['model_type'])
  shapes = {name: () for leaf in table for name in leaf.names}
  return types.SimpleNamespace(
    path='folder', config=config, generation={}, shapes=shapes
  )


def line_of(files, patch):
  """'' where the files are a model; AssertionError: not one line why not."""
  patch.setattr(source, 'open_', lambda path: files)
  try:
    checks.check_model(source.Source('folder').model)
  except errors.UserError as error:
    line = str(error)
    assert line and line.isprintable(), repr(line)
    return line
  return ''


@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', NAMES)
def test_a_mutant_is_a_model_or_one_line(name, monkeypatch):
  files = files_of(hf_families.read_golden(name)['config'])
  assert not line_of(files, monkeypatch)
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

  @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
  @hypothesis.given(mutants(files.config))
  def run(config):
    changed = types.SimpleNamespace(**vars(files) | dict(config=config))
    line_of(changed, monkeypatch)

  run()
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown * 1024 < MOST_BYTES


@pytest.mark.parametrize(
  'name, changes, text',
  [
    ('llama_yarn', dict(num_hidden_layers=10**12), 'num_hidden_layers'),
    ('llama_yarn', dict(num_hidden_layers=10_000), '10000 layers'),
    ('mixtral', dict(num_local_experts=10**12), 'num_local_experts'),
    ('llama_yarn', dict(rms_norm_eps=10**400), 'rms_norm_eps'),
    ('gemma3_text', dict(query_pre_attn_scalar=-(10**400)), 'query_pre_attn'),
    ('llama_yarn', {'a\nb': 1}, "'a\\nb'"),
  ],
)
def test_what_is_too_large_is_named(name, changes, text, monkeypatch):
  files = files_of(hf_families.read_golden(name)['config'])
  files.config = files.config | changes
  assert text in line_of(files, monkeypatch)


def test_many_layers_of_many_experts_are_not_written_out(monkeypatch):
  """1,000 layers of 4,096 experts are 12 million names."""
  files = files_of(hf_families.read_golden('mixtral')['config'])
  files.shapes |= {f'other.{i}': () for i in range(1000)}
  files.config = files.config | dict(
    num_hidden_layers=1000, num_local_experts=4096
  )
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert 'tensors' in line_of(files, monkeypatch)
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown * 1024 < MOST_BYTES


def test_a_crash_is_seen(monkeypatch):
  files = files_of(hf_families.read_golden('llama')['config'])
  files.config = files.config | dict(head_dim='x')
  assert 'head_dim' in line_of(files, monkeypatch)
  monkeypatch.setattr(reader.Reader, 'typed', lambda self, n, v, *kind: v)
  monkeypatch.setattr(reader.Reader, 'checked', lambda self, n, v, ours: v)
  with pytest.raises(TypeError):
    line_of(files, monkeypatch)
