"""A step as scripts.gpuday.process starts one: does what its name says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

name, work = sys.argv[1], Path(sys.argv[2])
result = work / f"{name}.json"
match name:
    case "well":
        print("all is well")
        result.write_text(json.dumps({"status": "done", "lines": ["a line"]}))
    case "fault":
        print("CUDA error: an illegal memory access was encountered")
        sys.exit(134)
    case "polite":
        signal.signal(signal.SIGTERM, lambda *_: (print("cleaned up", flush=True), sys.exit(0)))
        (work / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    case "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (work / "child").write_text(str(child.pid))
        print("stuck", flush=True)
        time.sleep(60)
