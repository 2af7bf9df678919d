"""Idle priority: of what is started there alone, and for users without rights, too."""

import os
import subprocess
import sys

import pytest

from trio_pool_serve.threads.dedicated_threads import HAS_IDLE_PRIORITY, at_idle_priority

linux_only = pytest.mark.skipif(not HAS_IDLE_PRIORITY, reason="this system has no idle priority")

WITHOUT_RIGHTS = """
import os
from trio_pool_serve.threads.dedicated_threads import at_idle_priority
if os.geteuid() == 0:
    os.setuid(65534)
for _ in range(2):
    assert at_idle_priority(lambda: os.sched_getscheduler(0)) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
print("done")
"""


@linux_only
def test_a_user_without_rights_goes_on_at_its_own_priority():
    done = subprocess.run([sys.executable, "-c", WITHOUT_RIGHTS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_an_exception_at_idle_priority_is_raised_to_the_caller():
    with pytest.raises(ZeroDivisionError):
        at_idle_priority(lambda: 1 // 0)


@linux_only
def test_a_system_that_does_not_allow_it_computes_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert at_idle_priority(lambda: os.sched_getscheduler(0)) == os.SCHED_OTHER
