"""What a user's ``RLINF_EXT_MODULE`` may name."""

registrations: list[str] = []


def register() -> None:
    registrations.append("called")
