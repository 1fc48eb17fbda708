"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell starts its background jobs with SIGINT ignored, and what is ignored stays so in every
# child. Tests that interrupt a process need the default there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
