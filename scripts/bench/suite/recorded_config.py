# SPDX-License-Identifier: Apache-2.0
"""`one_config`, with a timeline recorded in all of its processes.

`timeline.py` starts it. Forked processes have the wrappers; spawned ones import this
module as their main one, and so have them too.
"""

import os
from pathlib import Path

from . import one_config
from .hooks import Hooks
from .jobs import DEVICE_TIMES, EVENTS
from .recorder import Recorder

Hooks(Recorder(Path(os.environ[EVENTS])), DEVICE_TIMES in os.environ).install()

if __name__ == "__main__":
    one_config.main()
