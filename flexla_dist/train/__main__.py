"""`python -m flexla_dist.train`, the same as `flexla-dist train`."""

import sys

from flexla_dist.train.program import main

if __name__ == "__main__":
    sys.exit(main())
