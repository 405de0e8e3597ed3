"""Writes tests/golden/peers: what models of `transformers` compute.

    python tests/golden/make_peers.py [NAME ...]

Needs torch and transformers; nothing is fetched: models are tiny, their weights
follow from their names (tests/peers.py `weight`). Tests marked `hf` compare all
of it anew; these files let every machine compare a part.
"""

import importlib
import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent
FILES = (
  'models/test_hf_parity.py',
  'models/ffn/test_moe_peers.py',
  'models/mixers/test_latent_peers.py',
  'models/mixers/test_mamba_peers.py',
)


def main(names):
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['HF_HUB_OFFLINE'] = '1'
  folders = [TESTS, *((TESTS / file).parent for file in FILES)]
  sys.path[:0] = list(map(str, folders))
  import hf_peer
  import jax
  import peers

  versions = f'transformers {hf_peer.transformers.__version__}'
  versions += f', torch {hf_peer.torch.__version__}'
  peers.GOLDEN.mkdir(exist_ok=True)
  left = set(names)
  with jax.enable_x64(True):
    for file in FILES:
      family = importlib.import_module(pathlib.Path(file).stem).FAMILY
      for name in family.names:
        if name in left or not names:
          left.discard(name)
          peers.write_golden(family, name, versions)
          print(peers.GOLDEN / f'{name}.json')
  if left:
    sys.exit(f'no model is named {", ".join(sorted(left))}')


if __name__ == '__main__':
  main(sys.argv[1:])
