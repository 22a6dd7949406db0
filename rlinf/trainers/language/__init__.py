"""Trainers of language models: policies, critics and supervised fine-tuning over token batches."""
