"""The way to the Hub and to serving engines: model cards, uploads, and the parallel-draft layout."""
