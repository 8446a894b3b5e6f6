"""`python -m zerocore`: the console command, for where it is not installed."""

import sys

from zerocore._cli import main

sys.exit(main())
