"""`python -m paraxis.train ARGS` is `paraxis train ARGS`."""

import sys

from paraxis.train import cli

if __name__ == '__main__':
  sys.exit(cli.main(['train', *sys.argv[1:]]))
