"""A program that is tied to its starter ends with it, even when that is killed."""

import os
import signal
import subprocess
import sys
import time

import psutil

from workers.processes.process import ROOT

STARTER = """
import subprocess, sys, time
from pipeline.adapters.tied_process import tied
child = subprocess.Popen(tied(["sleep", "60"]), start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""
SECONDS = 20.0


def test_a_tied_program_dies_with_a_killed_starter():
    starter = subprocess.Popen([sys.executable, "-c", STARTER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(starter.stdout.readline()))
    deadline = time.monotonic() + SECONDS
    while child.name() != "sleep" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.name() == "sleep"
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait(SECONDS)
    starter.stdout.close()
    child.wait(SECONDS)
