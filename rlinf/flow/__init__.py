"""M2Flow: graph, plan and executor."""
