"""``python -m mimo_vk``: the same as ``mimo-vk``."""

import sys

from mimo_vk.cli import main

sys.exit(main())
