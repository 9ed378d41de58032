"""Building corpora: documents in, token ids, frozen automata in a folder."""
