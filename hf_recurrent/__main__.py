"""`python -m hf_recurrent` is `hf-recurrent`."""

import sys

from .cli import main

sys.exit(main())
