import fairseq.modules  # noqa: F401  (first: it imports the plugin, and with it this package, outside of a cycle)
