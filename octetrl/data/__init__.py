"""Read files of tasks, conversations and preference pairs, and load tokenizers. No torch."""
