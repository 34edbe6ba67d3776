"""`make demo`: hundreds of conversations on one file, and a SIGKILL in the middle.

`gateway` is the process that is killed: a runtime, and the people who talk to it. `told` is all
that the world outside learns from it. `stored` reads the file, `account` holds the one against the
other, and `__main__` plays the world: it starts, kills, starts again and shows what came of it, on
a `display`.
"""
