# SPDX-License-Identifier: Apache-2.0
"""A scheduler that writes down how long its steps take, for `--scheduler-cls`.

`KV_TIER_STEPS` names the file: a line for each step that schedules tokens, with the
seconds of `schedule()` and the number of tokens.
"""

import os
import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class TimedScheduler(Scheduler):
    """See above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._steps = os.open(os.environ["KV_TIER_STEPS"], flags, 0o600)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begun = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        seconds = time.perf_counter() - begun
        if output.total_num_scheduled_tokens:
            line = f"{seconds} {output.total_num_scheduled_tokens}\n"
            os.write(self._steps, line.encode())
        return output
