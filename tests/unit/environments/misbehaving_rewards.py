"""Rewards that misbehave, at the top level of a module as a reward worker wants them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from octetrl.environments.scoring import Explained
from octetrl.records import Task


def by_name(task: Task, completion_text: str) -> object:
    """Does what the completion says."""
    match completion_text:
        case "raise":
            raise KeyError("missing column")
        case "hang":
            time.sleep(60)
        case "hang in C":
            return float(len(str(7 ** (7**9))))  # holds the interpreter's lock for far longer than the timeout
        case "exit":
            sys.exit(3)
        case "crash":
            os.abort()
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "1.0"
        case "bool":
            return True
        case "print":
            print("noise on stdout")
            return 0.25
        case "explain":
            return Explained(0.25, "one of four")
        case "pid":
            return os.getpid()
        case "child":
            child = subprocess.Popen(["sleep", "60"])
            Path(task.id).write_text(str(child.pid))
            time.sleep(60)
    return float(len(completion_text))
