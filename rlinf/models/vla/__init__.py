"""Vision-language-action models: published architectures as policies for actions."""
