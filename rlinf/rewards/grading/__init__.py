"""Unit tests of unread programs: the tests run in one sandbox, the program in another.

Only plain values pass between the two, so a program can neither see what is expected of it, nor
change the tests, nor answer with an object that claims to be equal to everything.
"""
