"""What only programs written against the published interface use; the system does not."""
