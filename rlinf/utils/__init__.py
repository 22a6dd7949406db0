"""Names under which published programs look for helpers."""
