"""Names of machines, and what a name that is none says."""

import pytest
import support

from paraxis.sharding.meter import target


@pytest.mark.parametrize('name', target.EXAMPLES)
def test_examples_are_valid(name):
  kind, chip, sizes = target.parse(name)
  assert chip is target.CHIPS[kind] and all(n > 0 for n in sizes)
  assert {n.partition(':')[0] for n in target.EXAMPLES} == set(target.CHIPS)


@pytest.mark.parametrize(
  'name, slices, sizes',
  [
    ('v5p:8x8x8', 1, (8, 8, 8)),
    ('v5e:16x16', 4, (16, 16)),
    ('h200:256', 1, (1, 32, 8)),
    ('h200:1x32x8', 1, (1, 32, 8)),
    ('h100:4', 1, (1, 1, 4)),
    ('h100:2x4x8', 1, (2, 4, 8)),
  ],
)
def test_sizes(name, slices, sizes):
  assert target.parse(name, slices)[2] == sizes


@pytest.mark.parametrize(
  'name, slices, words',
  [
    ('', 1, ('not CHIP:SIZES', 'v5p:8x8x8', 'h200:256')),
    ('v7x:4x4x4', 1, ('not CHIP:SIZES', "Did you mean 'tpu7x'")),
    ('v5p', 1, ('not CHIP:SIZES',)),
    ('v5p:8x0x8', 1, ('not CHIP:SIZES',)),
    ('v5p:4x4', 1, ('torus of 3 dimensions', 'has 2')),
    ('v5e:4x4x4', 1, ('torus of 2 dimensions', 'has 3')),
    ('v5e:32x32', 1, ('1024 chips', 'has 256', '--slices')),
    ('v5e:4x4', 0, ('--slices=0',)),
    ('h200:8', 2, ('--slices=2', 'SLICESxHOSTSx8')),
    ('h200:20', 1, ('multiple of it', 'nearest is 16')),
    ('h200:4x8', 1, ('SLICESxHOSTSxGPUS',)),
    ('h200:1x4x16', 1, ('at most 8 GPUs',)),
  ],
)
def test_bad_names(name, slices, words):
  with support.refused(*words):
    target.parse(name, slices)


def test_text_of_a_gpu():
  text = target.cuda_text('h200')
  assert text.count('{') == text.count('}') == 3
  assert text.count('NVIDIA H200 141GB HBM3e') == 2
  assert 'device_memory_size: 151397597184' in text
