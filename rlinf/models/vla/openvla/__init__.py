"""OpenVLA and OpenVLA-OFT."""
