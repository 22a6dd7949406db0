"""What answers messages: registry, channels, mailboxes, leases, ports, diagnosis, trace."""
