"""Small policies from pictures and proprioception: ACT and the diffusion policy."""
