"""fairseq criterions of this plugin."""
