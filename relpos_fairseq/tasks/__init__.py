"""fairseq tasks of this plugin."""
