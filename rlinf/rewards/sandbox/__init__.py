"""Programs that nobody has read, run in isolation: kernel namespaces, limits, a system call filter.

Needs Linux, the standard library and no privileges; see
:class:`~rlinf.rewards.sandbox.host.Sandbox`.
"""
