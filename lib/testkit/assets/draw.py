"""Draws numbers whenever it is asked, out of generators that were warm before: Python's, OpenSSL's, and one that nobody tells
that it goes on in another machine."""

import os
import random
import signal
import ssl

ASK, DRAWN = "/tmp/ask", "/tmp/drawn"
deaf = random.Random(7)


def begin_anew(*_):
    random.seed()
    ssl.RAND_add(os.urandom(64), 64.0)


random.seed(7)
ssl.RAND_bytes(1)
signal.signal(signal.SIGUSR1, begin_anew)
os.mkfifo(ASK)
print("warm", flush=True)
while True:
    with open(ASK) as ask:
        ask.read()
    with open(DRAWN + ".new", "w") as drawn:
        print(random.random(), ssl.RAND_bytes(16).hex(), deaf.random(), file=drawn)
    os.rename(DRAWN + ".new", DRAWN)
