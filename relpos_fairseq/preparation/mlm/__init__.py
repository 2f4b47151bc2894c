"""From plain text to what masked language models are pre-trained on."""
