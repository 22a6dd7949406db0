"""How bytes and objects travel: endpoints, payloads, shared memory."""
