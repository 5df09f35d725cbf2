"""`python -m jaxpage` is the `jaxpage` command."""

import sys

from jaxpage.cli import main

sys.exit(main())
