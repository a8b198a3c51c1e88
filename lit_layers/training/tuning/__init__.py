"""Fine-tuning with blocks in another order: language models on a corpus or a task, encoders on GLUE."""
