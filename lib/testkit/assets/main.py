"""Shows how it was started: arguments, standard input, kernel; ends with the code that --exit names."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--exit", type=int, default=0)
parser.add_argument("words", nargs="*")
arguments = parser.parse_args()

print("python", ".".join(map(str, sys.version_info[:3])), "on", os.uname().sysname, os.uname().release)
print("user", os.getuid(), "in", os.getcwd())
print("arguments", arguments.words)
if not sys.stdin.isatty():
    print("input", repr(sys.stdin.read()))
sys.exit(arguments.exit)
